import pytest
import torch

from engine.scores import score


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 200])
def test_many_rows_have_the_scores_that_each_has_alone(num_rows: int) -> None:
    logits = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(num_rows))
    token_ids = [7 * row % 300 for row in range(num_rows)]
    alone = [score(logits[row : row + 1], [token_id], 3)[0] for row, token_id in enumerate(token_ids)]
    assert list(score(logits, token_ids, 3)) == alone


def test_scores_are_the_log_softmax_with_rank_and_top() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0], [5.0, 5.0, 0.0]])
    first, second = score(logits, [1, 0], 2)
    expected = torch.log_softmax(logits, -1)
    assert (first.token_id, first.rank, second.rank) == (1, 2, 1)
    assert first.logprob == expected[0, 1].item()
    assert [token for token, _ in first.top] == [2, 1] and first.top[0][1] == expected[0, 2].item()
    assert score(logits, [1, 0], 0)[0].top == ()
