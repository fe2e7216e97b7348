"""Log-probabilities of tokens, computed from the logits from which they were sampled."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from engine.core.batch import TokenLogprobs
from engine.runner.row_gather import take_rows

__all__ = ["ROWS_AT_ONCE", "Scorer", "score_in_torch"]

ROWS_AT_ONCE = 64  # each takes several times the memory of its logits in torch

Score = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Logits [num_rows, vocab], token ids [num_rows], num_top -> log-probability and rank of each row's token, [num_rows],
and each row's num_top largest log-probabilities and their tokens, [num_rows, num_top]."""


class Scorer:
    """Computes log-probabilities. It has no state: only the implementation for this device."""

    def __init__(self, has_kernels: bool) -> None:
        self._score = cast(Score, torch.ops.twostep.score_tokens) if has_kernels else score_in_torch

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        """Scores `token_ids`, one per row of `logits` [num_rows, vocab], with each row's `num_top` likeliest tokens."""
        starts = range(0, len(token_ids), ROWS_AT_ONCE)
        parts = (slice(start, start + ROWS_AT_ONCE) for start in starts)
        return tuple(chain.from_iterable(self._score_some(logits[part], token_ids[part], num_top) for part in parts))

    def score_rows(self, logits: Tensor, wanted: Sequence[tuple[int, int, int]]) -> dict[int, TokenLogprobs]:
        """Scores some rows of `logits`; `wanted` has (row, token id, number of top tokens). Returns scores by row."""
        scores: dict[int, TokenLogprobs] = {}
        for num_top in {num_top for _, _, num_top in wanted}:
            rows, token_ids = zip(*((row, token_id) for row, token_id, each in wanted if each == num_top), strict=True)
            scores |= zip(rows, self.score(take_rows(logits, rows), token_ids, num_top), strict=True)
        return scores

    def _score_some(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> Iterator[TokenLogprobs]:
        tokens = torch.tensor(token_ids, device=logits.device)
        logprobs, ranks, top_logprobs, top_ids = self._score(logits, tokens, min(num_top, logits.shape[1]))
        top = (map(tuple, each.tolist()) for each in (top_ids, top_logprobs))
        columns = zip(token_ids, logprobs.tolist(), ranks.tolist(), *top, strict=True)
        return (TokenLogprobs(*column) for column in columns)


def score_in_torch(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements `Score` on any device; which of equal logits are among the top is torch's choice."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    return chosen[:, 0], ranks, *logprobs.topk(num_top, dim=-1)
