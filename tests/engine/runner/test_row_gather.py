"""Gathered rows of logits are the rows asked for, copied only where they must be."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.row_gather import take_rows


@given(st.sets(st.integers(0, 9)).map(sorted))
def test_rows_are_those_that_were_asked_for(rows: list[int]) -> None:
    logits = torch.arange(30.0).view(10, 3)
    assert torch.equal(take_rows(logits, rows), logits[rows])


def test_rows_that_lie_side_by_side_are_not_copied() -> None:
    logits = torch.zeros(4, 3)
    take_rows(logits, [1, 2]).fill_(1)
    assert logits.sum(1).tolist() == [0, 3, 3, 0]
