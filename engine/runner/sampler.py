"""Samples the next token of every row: the likeliest one, or one drawn with a uniform random number.

The number is a function of (seed, position) and every operation works on one row alone, so a sampled token depends
neither on the batch nor on how often the request was preempted.
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
"""Logits [num_rows, vocab] -> token ids [num_rows], the lowest of equals; -1 where the largest logit is not finite."""


class Sampler:
    """Samples rows of logits. It has no state: only the implementations for this device, and the EOS tokens."""

    def __init__(self, device: torch.device, has_kernels: bool, eos_token_ids: tuple[int, ...]) -> None:
        self._argmax = argmax_for(device, has_kernels)
        self._draw = draw_for(has_kernels)
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[int | None]:
        """Returns one token id per row of `logits` [len(requests), vocab]; None where no token is possible."""
        tokens: list[int | None] = [None] * len(requests)
        are_processed = [bool(request.allowed_tokens) or adjusts_logits(request) for request in requests]
        for is_processed in set(are_processed):
            rows = [row for row, each in enumerate(are_processed) if each is is_processed]
            some = [requests[row] for row in rows]
            part = take_rows(logits, rows)
            part = self._process(part, some) if is_processed else part
            for row, token_id in zip(rows, self._sample_rows(part, some), strict=True):
                tokens[row] = token_id
        return tokens

    def _process(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> Tensor:
        """Returns a float32 copy of the logits [len(requests), vocab] with grammar masks and processors applied."""
        logits = logits.to(torch.float32, copy=True)
        forbid_tokens(logits, requests)
        for row, request in zip(logits, requests, strict=True):
            adjust_row(row, request, self._eos_token_ids)
        return logits

    def _sample_rows(self, logits: Tensor, requests: Sequence[ScheduledRequest]) -> list[int | None]:
        sampled = self._argmax(logits)
        drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if drawn:
            controls = controls_of([requests[row] for row in drawn])
            sampled[drawn] = self._draw(take_rows(logits, drawn), sampled[drawn], controls)
        return [None if token_id < 0 else token_id for token_id in sampled.tolist()]


def argmax_for(device: torch.device, has_kernels: bool) -> Argmax:
    """Returns the fastest argmax for this device."""
    if has_kernels:
        return cast(Argmax, torch.ops.twostep.argmax)
    return argmax_in_numpy if device.type == "cpu" else _argmax_in_torch


def argmax_in_numpy(logits: Tensor) -> Tensor:
    """The argmax of the CPU without kernels: NumPy takes a fifth of torch's time."""
    return _checked(logits, torch.from_numpy(logits.float().numpy().argmax(axis=-1)))


def _argmax_in_torch(logits: Tensor) -> Tensor:
    return _checked(logits, logits.argmax(dim=-1))


def _checked(logits: Tensor, likeliest: Tensor) -> Tensor:
    """Returns the token ids `likeliest`, with -1 where their logit is not finite."""
    return torch.where(logits.gather(1, likeliest[:, None])[:, 0].isfinite(), likeliest, -1)
