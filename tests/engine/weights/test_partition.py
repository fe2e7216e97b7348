"""Parts of ranks: together they are everything, and no part overlaps another but heads of keys and values."""

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.weights.partition import Cut, even_cut, head_parts, starts_of
from engine.weights.rank_group import ALONE, NoExchange, RankGroup


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 70))
def test_parts_follow_one_another_in_whole_units(count: int, size: int, unit: int) -> None:
    starts = starts_of(count, size, unit)
    assert len(starts) == size + 1 and starts[0] == 0 and starts[-1] == count
    assert list(starts) == sorted(starts) and all(start % unit == 0 or start == count for start in starts)
    units = [-(-(end - start) // unit) for start, end in pairwise(starts)]
    assert max(units) - min(units) <= 1


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_every_head_is_one_ranks_and_reads_its_own_keys(num_kv_heads: int, group: int, data: st.DataObject) -> None:
    num_heads = num_kv_heads * group
    size = data.draw(st.integers(1, num_heads))
    parts = head_parts(num_heads, num_kv_heads, size)
    assert len(parts) == size
    assert list(chain.from_iterable(part.query for part in parts)) == list(range(num_heads))
    for part in parts:
        assert len(part.query) > 0 and len(part.query) % len(part.kv) == 0
        own_group = len(part.query) // len(part.kv)
        for place, head in enumerate(part.query):
            assert part.kv[place // own_group] == head // group


@given(st.integers(1, 700), st.integers(2, 6))
def test_even_parts_are_the_whole_weight(num_out: int, size: int) -> None:
    weight = torch.arange(3.0 * num_out).view(num_out, 3)
    cuts = [even_cut(num_out, RankGroup(rank, size, NoExchange())) for rank in range(size)]
    if num_out < size:
        assert cuts == [None] * size
    else:
        assert torch.equal(torch.cat([cut.own(weight) for cut in cuts if cut]), weight)


def test_a_model_of_one_rank_is_not_cut() -> None:
    assert even_cut(100, ALONE) is None


@pytest.mark.parametrize("rows", [(slice(2, 4),), (slice(4, 6), slice(0, 1))])
def test_a_part_has_its_rows_in_order(rows: tuple[slice, ...]) -> None:
    bias = torch.arange(6)
    assert Cut(rows, len(bias)).own(bias).tolist() == [*chain.from_iterable(bias[each].tolist() for each in rows)]


@pytest.mark.parametrize("rows", [(slice(2, 4),), (slice(4, 6), slice(0, 1)), (slice(None),)])
def test_places_of_columns_are_where_a_part_has_them(rows: tuple[slice, ...]) -> None:
    weight, columns = torch.arange(60).view(6, 10), torch.tensor([5, 0, 3])
    cut = Cut(rows, len(weight))
    which, places = cut.places_of(columns)
    assert torch.equal(cut.own(weight)[places], weight[columns[which]])
    assert {*columns[which].tolist()} == {*columns.tolist()} & {*cut.own(torch.arange(6)).tolist()}
