"""Log-probabilities are those of the log-softmax, and the kernel's are those of torch."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels import load_kernels
from engine.runner.cuda_scorer import CudaScorer, score_in_whole_numbers
from engine.runner.logprobs import Scorer, score_in_torch


@pytest.fixture(params=["kernel", "torch", "whole numbers"])
def scorer(request: pytest.FixtureRequest) -> Scorer:
    if request.param == "whole numbers":
        return CudaScorer()
    return kernel() if request.param == "kernel" else Scorer(has_kernels=False)


def kernel() -> Scorer:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    return Scorer(has_kernels=True)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 200])
def test_many_rows_have_the_scores_that_each_has_alone(scorer: Scorer, num_rows: int) -> None:
    logits = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(num_rows))
    token_ids = [7 * row % 300 for row in range(num_rows)]
    alone = [scorer.score(logits[row : row + 1], [token_id], 3)[0] for row, token_id in enumerate(token_ids)]
    assert list(scorer.score(logits, token_ids, 3)) == alone


def test_rows_that_want_different_scores_have_those_of_each_alone(scorer: Scorer) -> None:
    logits = torch.randn(6, 40)
    wanted = [(0, 3, 2), (2, 39, 0), (3, 7, 2), (4, 1, 2), (5, 0, 40)]
    alone = {row: scorer.score(logits[row : row + 1], [token_id], num_top)[0] for row, token_id, num_top in wanted}
    assert scorer.score_rows(logits, wanted) == alone and scorer.score_rows(logits, []) == {}


def test_scores_are_the_log_softmax_with_rank_and_top(scorer: Scorer) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [5.0, 5.0, 0.0]])
    first, second = scorer.score(logits, [1, 0], 2)
    expected = torch.log_softmax(logits.double(), -1)
    assert (first.token_id, first.rank, second.rank) == (1, 2, 1)
    assert first.logprob == pytest.approx(expected[0, 1].item(), abs=1e-6)
    assert [token for token, _ in first.top] == [2, 1] and first.top[1][1] == first.logprob
    assert sorted(token for token, _ in second.top) == [0, 1]
    assert scorer.score(logits, [1, 0], 0)[0].top == ()
    assert len(scorer.score(logits, [1, 0], 100)[0].top) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 100.0])
def test_the_kernel_has_the_scores_of_torch(size: int, scale: float, dtype: torch.dtype) -> None:
    kernel()
    logits = (torch.randn(33, size, generator=torch.Generator().manual_seed(size)) * scale).to(dtype)
    logits[1:, size // 3] = -torch.inf if size > 1 else 0
    tokens = torch.arange(33) * 31 % size
    num_top = min(20, size)
    scores = torch.ops.twostep.score_tokens(logits, tokens, num_top)
    expected = score_in_torch(logits.double(), tokens, num_top)
    for name, one, other in zip(("logprobs", "ranks", "top"), scores, expected, strict=False):
        torch.testing.assert_close(
            one, other.to(one.dtype), rtol=2e-6, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(scores[3], in_order(logits)[:, :num_top])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        part = torch.ops.twostep.score_tokens(logits[5:9], tokens[5:9], num_top)
        for one, other in zip(scores, part, strict=True):
            assert torch.equal(one[5:9], other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 257, 4096, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 100.0])
def test_whole_numbers_have_the_scores_of_torch(size: int, scale: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(33, size, generator=torch.Generator().manual_seed(size)) * scale).to(dtype)
    logits[1:, size // 3] = -torch.inf if size > 1 else 0
    logits[2:4, size // 2] = -0.0
    tokens = torch.arange(33) * 31 % size
    num_top = min(20, size)
    scores = score_in_whole_numbers(logits, tokens, num_top)
    logprobs, _, top_logprobs, _ = score_in_torch(logits.double(), tokens, num_top)
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(dim=1) + 1
    expected = torch.cat([logprobs[:, None], ranks[:, None], top_logprobs], dim=1)
    torch.testing.assert_close(scores[:, : 2 + num_top].float(), expected.float(), rtol=2e-6, atol=2e-6)
    assert torch.equal(scores[:, 2 + num_top :].long(), in_order(logits)[:, :num_top])
    assert torch.equal(score_in_whole_numbers(logits[5:9], tokens[5:9], num_top), scores[5:9])


def test_a_certain_token_has_a_log_probability_of_zero_at_most() -> None:
    logits = torch.full((1, 40_000), -20.0)
    logits[0, 7] = 4.0
    [logprob, rank] = score_in_whole_numbers(logits, torch.tensor([7]), 0)[0].tolist()
    assert logprob == pytest.approx(-40_000 * math.exp(-24), rel=1e-3) and rank == 1


def in_order(logits: Tensor) -> Tensor:
    """Returns each row's token ids, the likeliest first; among equals, the lower ids first."""
    return logits.float().sort(dim=1, descending=True, stable=True).indices


def test_scores_of_a_row_of_nan_are_nan(scorer: Scorer) -> None:
    [score] = scorer.score(torch.tensor([[0.0, torch.nan, 1.0]]), [0], 2)
    assert score.logprob != score.logprob


def test_the_kernel_refuses_what_does_not_fit() -> None:
    kernel()
    logits, tokens = torch.zeros(2, 9), torch.zeros(2, dtype=torch.long)
    for wrong in (
        (logits[0], tokens, 1),
        (logits[:, :0], tokens, 0),
        (logits, tokens[:1], 1),
        (logits, tokens.int(), 1),
        (logits, tokens + 9, 1),
        (logits, tokens - 1, 1),
        (logits, tokens, 10),
        (logits, tokens, -1),
    ):
        with pytest.raises(RuntimeError):
            torch.ops.twostep.score_tokens(*wrong)
    with pytest.raises(NotImplementedError, match="Half"):
        torch.ops.twostep.score_tokens(logits.half(), tokens, 1)
