"""A request with draft tokens as rows of one token each, and how many of them are accepted."""

import pytest

from engine.scheduling.speculation.draft_verification import (
    last_row,
    num_accepted_drafts,
    rows_of,
    shortened,
    with_draft_token,
)
from tests.engine.scheduling.speculation.prophets import scheduled


def test_each_draft_token_is_a_row_after_those_before_it() -> None:
    rows = list(rows_of(scheduled([8, 9])))
    assert [(row.start, row.end, list(row.token_ids), list(row.output_token_ids)) for row in rows] == [
        (4, 5, [7], [7]),
        (5, 6, [8], [7, 8]),
        (6, 7, [9], [7, 8, 9]),
    ]
    assert all(row.num_drafts == 0 and row.samples for row in rows)
    alone = scheduled([])
    assert list(rows_of(alone)) == [alone]


@pytest.mark.parametrize(
    ("chosen", "count"), [([8, 9, 1], 2), ([8, 1, 9], 1), ([1, 9, 9], 0), ([None, 9, 9], 0), ([8, None, 1], 1)]
)
def test_drafts_are_accepted_up_to_the_first_that_differs(chosen: list[int | None], count: int) -> None:
    assert num_accepted_drafts(scheduled([8, 9]), chosen) == count
    assert num_accepted_drafts(scheduled([]), chosen) == 0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_draft_may_be_shortened(count: int) -> None:
    cut = shortened(scheduled([8, 9]), count)
    assert (list(cut.token_ids), cut.num_drafts, list(cut.draft), cut.end) == (
        [7, 8, 9][: 1 + count],
        count,
        [8, 9][:count],
        5 + count,
    )


@pytest.mark.parametrize("drafts", [[], [8], [8, 9]])
def test_the_next_draft_token_follows_the_last_row(drafts: list[int]) -> None:
    request = scheduled(drafts, num_wanted=3)
    row, expected = last_row(request), [*rows_of(request)][-1]
    assert (row.start, [*row.token_ids], [*row.output_token_ids]) == (
        expected.start,
        [*expected.token_ids],
        [*expected.output_token_ids],
    )
    assert (row.num_drafts, row.num_wanted, row.samples) == (0, 0, True)
    longer = with_draft_token(request, 5)
    assert (list(longer.draft), longer.num_wanted, longer.end) == ([*drafts, 5], 3, request.end + 1)
    ended = with_draft_token(request, None)
    assert (list(ended.draft), ended.num_wanted, ended.end) == (drafts, len(drafts), request.end)
