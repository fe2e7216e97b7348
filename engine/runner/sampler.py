"""Chooses the next token of every row: the likeliest, or one drawn with a uniform number.

The number is a function of (seed, position) and every operation works on one row alone, so a sampled token depends
neither on the batch nor on how often the sequence was interrupted.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from engine.core.batch import ScheduledRequest
from engine.runner.logits_processors import adjust_row, adjusts_logits, forbid_tokens
from engine.runner.row_gather import take_rows
from engine.runner.token_draw import controls_of, draw_for

__all__ = ["Sampler", "argmax_for", "argmax_in_numpy"]

Argmax = Callable[[Tensor], Tensor]
"""Logits [num_rows, vocab] -> token ids [num_rows], the first of equals; -1 of a row whose largest is not finite."""


class Sampler:
    """Has no state but which code is the fastest here."""

    def __init__(self, device: torch.device, has_kernels: bool, eos_token_ids: tuple[int, ...]) -> None:
        self._argmax = argmax_for(device, has_kernels)
        self._draw = draw_for(has_kernels)
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[int | None]:
        """One token id per row of `logits` [len(requests), vocab]; None where no token is possible."""
        tokens: list[int | None] = [None] * len(requests)
        changes = [bool(request.allowed_tokens) or adjusts_logits(request) for request in requests]
        for changed in set(changes):
            rows = [row for row, each in enumerate(changes) if each is changed]
            some = [requests[row] for row in rows]
            part = take_rows(logits, rows)
            part = self._change(part, some) if changed else part
            for row, token_id in zip(rows, self._choose(part, some), strict=True):
                tokens[row] = token_id
        return tokens

    def _change(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
        """What requests want of their rows, [len(requests), vocab], before a token is chosen; in float32."""
        logits = logits.to(torch.float32, copy=True)
        forbid_tokens(logits, requests)
        for row, request in zip(logits, requests, strict=True):
            adjust_row(row, request, self._eos_token_ids)
        return logits

    def _choose(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[int | None]:
        chosen = self._argmax(logits)
        drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if drawn:
            controls = controls_of([requests[row] for row in drawn])
            chosen[drawn] = self._draw(take_rows(logits, drawn), chosen[drawn], controls)
        return [None if token_id < 0 else token_id for token_id in chosen.tolist()]


def argmax_for(device: torch.device, has_kernels: bool) -> Argmax:
    """The fastest on this device."""
    if has_kernels:
        return cast(Argmax, torch.ops.twostep.argmax)
    return argmax_in_numpy if device.type == "cpu" else _argmax_in_torch


def argmax_in_numpy(logits: Tensor) -> Tensor:
    """Takes a fifth of torch's time."""
    return _possible(logits, torch.from_numpy(logits.float().numpy().argmax(axis=-1)))


def _argmax_in_torch(logits: Tensor) -> Tensor:
    return _possible(logits, logits.argmax(dim=-1))


def _possible(logits: Tensor, likeliest: Tensor) -> Tensor:
    """The `likeliest`, and -1 where that is not finite."""
    return torch.where(logits.gather(1, likeliest[:, None])[:, 0].isfinite(), likeliest, -1)
