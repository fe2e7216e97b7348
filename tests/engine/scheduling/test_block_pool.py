"""Every block is free, held or cached, and handed out in that order of preference: free ones first."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.prefix_cache import NullPrefixCache
from tests.engine.scheduling.set_cache import SetCache


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(8, NullPrefixCache())
    blocks = pool.try_allocate(8)
    assert blocks is not None and sorted(blocks) == list(range(8))
    assert pool.try_allocate(1) is None


def test_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(4, NullPrefixCache())
    held = pool.try_allocate(2)
    assert held is not None
    before = pool.stats
    assert pool.try_allocate(3, shared=held) is None
    assert pool.stats == before and all(pool.ref_count(block) == 1 for block in held)


def test_spare_blocks_are_left_available() -> None:
    pool = BlockPool(4, NullPrefixCache())
    assert pool.try_allocate(3, spare=2) is None
    assert pool.try_allocate(2, spare=2) is not None


def test_a_shared_block_is_held_until_its_last_table_lets_go() -> None:
    pool = BlockPool(2, NullPrefixCache())
    first = pool.try_allocate(1) or []
    second = pool.try_allocate(0, shared=first) or []
    pool.release(first)
    assert pool.stats.held == 1
    pool.release(second)
    assert pool.stats.held == 0


def test_reviving_cached_blocks_does_not_count_them_as_available_for_the_rest() -> None:
    cache = SetCache()
    pool = BlockPool(2, cache)
    blocks = pool.try_allocate(2) or []
    cache.blocks.update(blocks)
    pool.release(blocks)
    assert pool.stats.cached == 2
    assert pool.try_allocate(1, shared=blocks) is None
    assert pool.try_allocate(0, shared=blocks) == blocks


def test_free_blocks_go_before_cached_ones_and_the_tail_of_the_oldest_prefix_first() -> None:
    cache = SetCache()
    pool = BlockPool(5, cache)
    old, new = pool.try_allocate(2) or [], pool.try_allocate(2) or []
    cache.blocks.update(old + new)
    pool.release(old)
    pool.release(new)
    taken = [(pool.try_allocate(1) or [-1])[0] for _ in range(5)]
    assert taken[0] not in old + new
    assert taken[1:] == [old[1], old[0], new[1], new[0]]
    assert cache.blocks == set()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model of it: a list of block tables."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SetCache()
        self.pool = BlockPool(12, self.cache)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 13), spare=st.integers(0, 3), source=st.integers(0, 100), length=st.integers(0, 4))
    def allocate(self, count: int, spare: int, source: int, length: int) -> None:
        shared = self.tables[source % len(self.tables)][:length] if self.tables else []
        could = count + spare <= self.pool.num_available
        blocks = self.pool.try_allocate(count, shared, spare)
        assert (blocks is not None) == could
        if blocks is not None:
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 100), is_cached=st.booleans())
    def release(self, index: int, is_cached: bool) -> None:
        table = self.tables.pop(index % len(self.tables))
        if is_cached:
            self.cache.blocks.update(table)
        self.pool.release(table)

    @invariant()
    def every_block_is_in_one_state_and_counted_by_its_tables(self) -> None:
        counts = [sum(table.count(block) for table in self.tables) for block in range(12)]
        assert [self.pool.ref_count(block) for block in range(12)] == counts
        stats = self.pool.stats
        assert stats.free + stats.held + stats.cached == 12
        assert stats.held == sum(1 for count in counts if count)
        assert stats.cached == sum(1 for block, count in enumerate(counts) if not count and block in self.cache.blocks)


TestPoolMachine = PoolMachine.TestCase


@given(st.lists(st.integers(1, 5), max_size=20))
def test_releasing_everything_leaves_nothing_held(sizes: list[int]) -> None:
    pool = BlockPool(100, NullPrefixCache())
    tables = [pool.try_allocate(size) or [] for size in sizes]
    for table in tables:
        pool.release(table)
    assert pool.stats.free == 100
