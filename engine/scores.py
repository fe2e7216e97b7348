"""Log-probabilities of tokens, from the logits they were chosen from."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from engine.batch import TokenLogprobs

__all__ = ["score"]

_ROWS_AT_ONCE = 64  # each takes several times the memory of its logits


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
