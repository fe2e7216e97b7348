"""Ranks that exchange columns through shared memory get what `torch.cat` makes of them, or an error."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ranks.memory import SharedMemory
from engine.weights.rank_group import ALONE, RankGroup
from tests.engine.ranks.rank_threads import groups, together

pytestmark = pytest.mark.usefixtures("ops")

PART_BYTES = 4096  # a page: larger matrices take several turns


def with_small_parts(size: int, timeout_s: float = 60.0) -> list[RankGroup]:
    memory = os.memfd_create("test")
    os.ftruncate(memory, torch.ops.twostep.exchange_size(size, PART_BYTES))
    exchange = torch.classes.twostep.Exchange
    made = [
        RankGroup(rank, size, SharedMemory(exchange(memory, rank, size, PART_BYTES, timeout_s))) for rank in range(size)
    ]
    os.close(memory)
    return made


@settings(max_examples=40)
@given(
    widths=st.lists(st.integers(0, 300), min_size=2, max_size=5).filter(any),
    row_counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_every_rank_gets_the_columns_of_all(widths: list[int], row_counts: list[int], dtype: torch.dtype) -> None:
    ranks = with_small_parts(len(widths))
    starts = [sum(widths[:rank]) for rank in range(len(widths) + 1)]
    parts = [[torch.randint(-99, 99, (rows, width)).to(dtype) for width in widths] for rows in row_counts]

    def run(group: RankGroup) -> list[Tensor]:
        gather = group.gather(starts)
        return [gather.run(part[group.rank]) for part in parts]

    expected = [torch.cat(part, dim=1) for part in parts]
    for gathered in together(ranks, run):
        assert all(map(torch.equal, gathered, expected))


def test_many_exchanges_in_a_row_keep_step() -> None:
    ranks = groups(3)

    def run(group: RankGroup) -> list[list[float]]:
        return [group.sum(turn, group.rank) for turn in range(2000)]

    assert together(ranks, run) == [[[3.0 * turn, 3.0] for turn in range(2000)]] * 3


def test_rows_need_not_be_contiguous() -> None:
    whole = torch.arange(24.0).view(6, 4).t()
    gathered = together(groups(2), lambda group: group.gather([0, 3, 6]).run(whole[:, 3 * group.rank :][:, :3]))
    assert torch.equal(gathered[0], whole) and torch.equal(gathered[1], whole)


def test_a_rank_alone_needs_no_memory() -> None:
    assert ALONE.sum(2, 3) == [2, 3] and ALONE.of_first(7) == 7


def test_a_rank_that_does_not_come_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="rank 1 has not answered for"):
        with_small_parts(2, timeout_s=0.1)[0].wait_for_all()


def test_ranks_that_are_given_up_wait_no_longer() -> None:
    first, second = with_small_parts(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait_for_all)
        time.sleep(0.01)
        second.exchange.abort()
        with pytest.raises(RuntimeError, match="given up"):
            waiting.result(30)


def test_what_does_not_fit_is_an_error_before_any_rank_waits() -> None:
    group = with_small_parts(2)[0]
    with pytest.raises(RuntimeError, match="does not fit"):
        group.gather([0, 2000, 4000]).run(torch.zeros(1, 2000))
    with pytest.raises(RuntimeError, match="do not have this rank's columns"):
        group.gather([0, 2, 4]).run(torch.zeros(1, 3))
    with pytest.raises(RuntimeError, match="begin where"):
        group.gather([0, 2])
