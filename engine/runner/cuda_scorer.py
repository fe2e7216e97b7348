"""Computes log-probabilities on a CUDA device, so that a row has the same ones among any others.

torch chooses the order of a sum by the shape of its tensor, and so its last bits. Here all sums are of whole numbers.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.core.batch import TokenLogprobs
from engine.runner.logprobs import ROWS_AT_ONCE, Scorer
from engine.runner.upload import upload

__all__ = ["CudaScorer", "score_in_whole_numbers"]

_UNIT = 2.0**-44  # of e**(logit - largest): a row's sum is below 2**63 with up to 2**18 tokens, and twice as many
_CHUNK = 4096  # tokens whose largest are found together
_LOW = 2**32 - 1  # the half of a key that tells the token


class CudaScorer(Scorer):
    """Computes log-probabilities as `Scorer` does, in one copy to the device and one back."""

    def __init__(self) -> None:
        super().__init__(has_kernels=False)

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        wanted = [(row, token_id, num_top) for row, token_id in enumerate(token_ids)]
        return tuple(self.score_rows(logits, wanted).values())

    def score_rows(self, logits: Tensor, wanted: Sequence[tuple[int, int, int]]) -> dict[int, TokenLogprobs]:
        if not wanted:
            return {}
        most = min(max(num_top for _, _, num_top in wanted), logits.shape[1])
        step = upload({"rows_and_tokens": np.array([pair[:2] for pair in wanted]).T}, logits.device)
        parts = zip(*(each.split(ROWS_AT_ONCE) for each in step["rows_and_tokens"]), strict=True)
        scores = torch.cat([score_in_whole_numbers(logits[rows], tokens, most) for rows, tokens in parts])
        return dict(_scores_of(wanted, scores.tolist(), most))


def _scores_of(
    wanted: Sequence[tuple[int, int, int]], numbers: Sequence[list[float]], most: int
) -> Iterator[tuple[int, TokenLogprobs]]:
    """Yields the rows with their scores, from the `numbers` that `score_in_whole_numbers` returned."""
    for (row, token_id, num_top), (logprob, rank, *top) in zip(wanted, numbers, strict=True):
        top_ids = tuple(map(int, top[most:][:num_top]))
        yield row, TokenLogprobs(token_id, logprob, int(rank), top_ids, tuple(top[:most][:num_top]))


def score_in_whole_numbers(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Returns, for each row of `logits` [num_rows, vocab], log-probability and rank of its token, its `num_top` largest
    log-probabilities, among equals by their ids, and their tokens: [num_rows, 2 + 2 * num_top] float64."""
    numbers = logits.float()
    largest = numbers.amax(dim=1, keepdim=True)
    masses = (torch.exp(numbers - largest) / _UNIT).nan_to_num().long().sum(dim=1, keepdim=True)
    log_sum = largest.double() + (masses.double() * _UNIT).log()
    chosen = numbers.gather(1, tokens[:, None])
    ranks = (numbers > chosen).sum(dim=1, keepdim=True) + 1
    ids = _top_ids(numbers, num_top)
    logprobs = torch.cat([chosen, numbers.gather(1, ids)], dim=1).double() - log_sum
    logprobs = torch.where(largest.isfinite(), logprobs, torch.nan).float()  # float32 is what all scores are in
    return torch.cat([logprobs[:, :1], ranks, logprobs[:, 1:], ids], dim=1)


def _top_ids(numbers: Tensor, num_top: int) -> Tensor:
    """Returns the tokens [num_rows, num_top] of each row's largest numbers, among equals by their ids.

    No two keys are equal, so that the order of the largest is not torch's choice.
    """
    vocab_size = numbers.shape[1]
    bits = (numbers + 0.0).view(torch.int32)  # without zeros that are negative
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) + torch.arange(vocab_size - 1, -1, -1, device=numbers.device)
    padded = pad(keys, (0, -vocab_size % _CHUNK), value=torch.iinfo(torch.long).min)
    candidates = padded.view(len(padded), -1, _CHUNK).topk(num_top, sorted=False).values.flatten(1)
    largest: Tensor = candidates.topk(num_top).values
    return vocab_size - 1 - (largest & _LOW)
