"""Of the blocks behind a prefix the one is found that agrees longest, and nothing is kept of those forgotten."""

from functools import partial
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.block_tokens import SortedBlockTokens

TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), min_size=4, max_size=4).map(tuple)
PARENTS = st.sampled_from([b"one", b"other"])


def num_equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


@given(
    blocks=st.sets(st.tuples(PARENTS, TOKENS), max_size=12),
    forgotten=st.sets(st.integers(0, 11)),
    parent=PARENTS,
    asked=TOKENS,
    length=st.integers(0, 4),
)
def test_the_block_that_agrees_longest_is_found(
    blocks: set[tuple[bytes, tuple[int, ...]]],
    forgotten: set[int],
    parent: bytes,
    asked: tuple[int, ...],
    length: int,
) -> None:
    tokens = SortedBlockTokens()
    for number, (before, block) in enumerate(blocks):
        tokens.add(before, partial(tuple, block), bytes([number]))
    for number in forgotten:
        tokens.remove(bytes([number]))
    left = [block for number, (before, block) in enumerate(blocks) if before == parent and number not in forgotten]
    found, block_hash = tokens.longest(parent, asked[:length])
    assert found == max((num_equal(asked[:length], block) for block in left), default=0)
    if block_hash:
        before, block = [*blocks][block_hash[0]]
        assert before == parent and num_equal(asked[:length], block) == found and block_hash[0] not in forgotten


def test_all_tokens_of_a_block_are_found() -> None:
    tokens = SortedBlockTokens()
    tokens.add(b"parent", partial(tuple, (1, 2, 3)), b"hash")
    assert tokens.longest(b"parent", (1, 2, 3)) == (3, b"hash")


def test_nothing_is_kept_of_forgotten_blocks() -> None:
    tokens = SortedBlockTokens()
    for number in range(8):
        tokens.add(b"parent", partial(tuple, (number, 1)), bytes([number]))
    for number in range(8):
        tokens.remove(bytes([number]))
        tokens.remove(bytes([number]))  # as often as wanted
    assert not tokens._blocks_behind and not tokens._place_of
    tokens.add(b"parent", partial(tuple, (1, 2)), b"hash")
    tokens.clear()
    assert tokens.longest(b"parent", (1, 2)) == (0, b"")
