"""Chooses the next token of every row: argmax, or the inverse of the filtered distribution at one uniform number.

The number is a function of (seed, position) and every operation works on one row alone, so a sampled token depends
neither on the batch nor on how often the sequence was interrupted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import cast

import numpy as np
import torch
from torch import Tensor

from engine.batch import ScheduledRequest, TokenLogprobs
from engine.logits import adjust_row, adjusts_logits, forbid_tokens
from engine.philox import uniforms
from engine.sampling_params import SamplingParams

Argmax = Callable[[Tensor], Tensor]
"""Logits [num_rows, vocab] -> token ids [num_rows], the first of equals; of a row with NaN, one that is NaN."""

_ROWS_AT_ONCE = 64  # that are scored: each takes several times the memory of its logits
NUM_CANDIDATES = 1024  # most likely tokens looked at first when only top_p or min_p filters


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of one step's logits, [num_rows, vocab], gets its token."""

    requests: Sequence[ScheduledRequest]
    adjusted: list[int]
    sampled: list[int]
    """The others are greedy."""

    @property
    def takes_likeliest(self) -> bool:
        """Whether each row's token is the likeliest, whatever it is."""
        is_free = not any(request.allowed_tokens for request in self.requests)
        return is_free and not self.adjusted and not self.sampled

    @classmethod
    def of(cls, requests: Sequence[ScheduledRequest]) -> "SamplingRows":
        return cls(
            requests,
            adjusted=[row for row, request in enumerate(requests) if adjusts_logits(request)],
            sampled=[row for row, request in enumerate(requests) if not request.params.is_greedy],
        )


def sample(
    logits: Tensor, requests: Sequence[ScheduledRequest], eos_token_ids: tuple[int, ...], argmax: Argmax
) -> list[int | None]:
    """One token id per row of `logits` [len(requests), vocab]; None where no token is possible."""
    rows = SamplingRows.of(requests)
    if rows.takes_likeliest:
        chosen = argmax(logits)
    else:
        logits = logits.to(torch.float32, copy=True)
        forbid_tokens(logits, requests)
        for row in rows.adjusted:
            adjust_row(logits[row], requests[row], eos_token_ids)
        chosen = _choose(logits, rows, argmax)
    values = logits.gather(1, chosen.unsqueeze(1)).tolist()  # -inf is not possible, nor is NaN
    return [token_id if value > -inf else None for token_id, [value] in zip(chosen.tolist(), values, strict=True)]


def argmax_for(device: torch.device, has_kernels: bool) -> Argmax:
    """The fastest on this device."""
    if has_kernels:
        return cast(Argmax, torch.ops.twostep.argmax)
    return argmax_in_numpy if device.type == "cpu" else _argmax_in_torch


def argmax_in_numpy(logits: Tensor) -> Tensor:
    """Takes a fifth of torch's time."""
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def _argmax_in_torch(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def _choose(logits: Tensor, rows: SamplingRows, argmax: Argmax) -> Tensor:
    """`logits` [num_rows, vocab] float32, changed in place -> token ids [num_rows]."""
    if not rows.sampled:
        return argmax(logits)
    params = [request.params for request in rows.requests]
    temperatures = torch.tensor([1.0 if p.is_greedy else p.temperature for p in params], dtype=torch.float32)
    logits /= temperatures.to(logits.device)[:, None]
    chosen = argmax(logits)
    draws = _draws(rows).to(logits.device)
    plain = [row for row in rows.sampled if not _filters(params[row])]
    if plain:
        chosen[plain] = _sample_plain(logits[plain], draws[plain])
    for row in rows.sampled:
        if _filters(params[row]):
            chosen[row] = _sample_filtered(logits[row], draws[row], params[row])
    return chosen


def _draws(rows: SamplingRows) -> Tensor:
    """[num_rows] float64: a uniform number for each sampled row, 0 for the others."""
    sampled = [rows.requests[row] for row in rows.sampled]
    draws = np.zeros(len(rows.requests))
    draws[rows.sampled] = uniforms([each.params.seed for each in sampled], [each.end for each in sampled])
    return torch.from_numpy(draws)


def score(logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of `token_ids`, one per row of `logits` [num_rows, vocab], and of the top ones beside it."""
    starts = range(0, len(token_ids), _ROWS_AT_ONCE)
    parts = (slice(start, start + _ROWS_AT_ONCE) for start in starts)
    return tuple(chain.from_iterable(_score_some(logits[part], token_ids[part], num_top) for part in parts))


def _score_some(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Iterator[TokenLogprobs]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])  # [num_rows, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top_values, top_ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)  # [num_rows, num_top]
    top = [tuple(zip(*pair, strict=True)) for pair in zip(top_ids.tolist(), top_values.tolist(), strict=True)]
    columns = zip(token_ids, chosen[:, 0].tolist(), ranks.tolist(), top, strict=True)
    return (TokenLogprobs(*column) for column in columns)


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _sample_plain(logits: Tensor, draws: Tensor) -> Tensor:
    """`logits` [n, vocab], `draws` [n] -> token ids [n]."""
    cdf = torch.softmax(logits, dim=-1).cumsum(dim=-1)
    return _invert(cdf, draws)


def _sample_filtered(logits: Tensor, draw: Tensor, params: SamplingParams) -> Tensor:
    """`logits` [vocab], `draw` [] -> token id []. All three filters keep a run of the most likely tokens."""
    vocab_size = logits.shape[0]
    count = min(params.top_k or NUM_CANDIDATES, vocab_size)
    probs = torch.softmax(logits, dim=-1)
    values, ids = probs.topk(count)
    cdf = values.cumsum(dim=0)
    num_kept = _num_kept(values, cdf, params)
    if num_kept == count and params.top_k == 0 and count < vocab_size:
        values, ids = probs.sort(descending=True, stable=True)
        cdf = values.cumsum(dim=0)
        num_kept = _num_kept(values, cdf, params)
    return ids[_invert(cdf[None, :num_kept], draw[None])[0]]


def _num_kept(values: Tensor, cdf: Tensor, params: SamplingParams) -> int:
    """How many of the candidates `values` (probabilities, best first) survive top_p and min_p; at least one.

    With top_k, top_p counts within the k candidates' own mass.
    """
    mass = cdf[-1] if params.top_k else 1.0
    keep = (cdf - values < params.top_p * mass) if params.top_p < 1.0 else torch.ones_like(values, dtype=torch.bool)
    keep &= values >= params.min_p * values[0]
    return max(1, int(keep.sum()))


def _invert(cdf: Tensor, draws: Tensor) -> Tensor:
    """First index of each row of `cdf` [n, m] above the row's draw in [0, 1) times the row's total; [n]."""
    totals = cdf[:, -1:].contiguous()
    targets = (draws[:, None] * totals).to(cdf.dtype)
    found = torch.searchsorted(cdf, targets, right=True)
    last = torch.searchsorted(cdf, totals)  # rounding may lift a target to the total
    return torch.minimum(found, last)[:, 0].clamp(max=cdf.shape[1] - 1)  # a row of NaN must not leave the vocabulary
