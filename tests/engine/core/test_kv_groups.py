"""The groups of layers that share blocks, and what a context takes in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv_groups import ONE_GROUP, KVGroups, groups_of

GEMMA = [512] * 5 + [None]
"""The windows of Gemma 3's layers, from the first on, again and again."""


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None, None], ONE_GROUP),
        ([], ONE_GROUP),
        ([8, 4], KVGroups(window=8)),
        ([4, None, 4, None], KVGroups((1, 0, 1, 0), 2, 4)),
        ([4, None, 8, 4], KVGroups((1, 0, 2, 3), 4, 8)),
        (GEMMA * 2, KVGroups((1, 1, 2, 2, 3, 0, 3, 4, 4, 5, 5, 0), 6, 512)),
        ([4, None, 4, None, 4], ONE_GROUP),  # a sixth of all blocks would stay empty
        ([4, None, None], ONE_GROUP),
    ],
)
def test_layers_of_equal_windows_are_in_groups_of_equal_size(windows: list[int | None], groups: KVGroups) -> None:
    assert groups_of(windows) == groups


@given(
    windows=st.lists(st.sampled_from([None, 3, 9]), min_size=1, max_size=12),
    num_tokens=st.integers(1, 200),
    block_size=st.integers(1, 8),
    max_chunk=st.integers(1, 40),
)
def test_a_context_never_holds_more_than_is_counted(
    windows: list[int | None], num_tokens: int, block_size: int, max_chunk: int
) -> None:
    groups = groups_of(windows)
    counted = groups.num_blocks(num_tokens, block_size, max_chunk)
    for start in range(num_tokens):
        end = min(num_tokens, start + max_chunk)
        visible = -(-end // block_size) - groups.first_visible_block(start, block_size)
        assert groups.num_full * -(-num_tokens // block_size) + groups.num_windowed * visible <= counted


@given(
    windows=st.sampled_from([[3], [3, None], [9, None, 9], [None]]),
    num_blocks=st.integers(0, 60),
    block_size=st.integers(1, 4),
    max_chunk=st.integers(1, 9),
    limit=st.integers(1, 150),
)
def test_the_longest_context_fits_and_no_longer_one_does(
    windows: list[int | None], num_blocks: int, block_size: int, max_chunk: int, limit: int
) -> None:
    groups = groups_of(windows)
    longest = groups.max_tokens(num_blocks, block_size, max_chunk, limit)
    assert longest == 0 or groups.num_blocks(longest, block_size, max_chunk) <= num_blocks
    assert longest == limit or groups.num_blocks(longest + 1, block_size, max_chunk) > num_blocks
