"""Retained blocks make room last, for as long as they are retained, and no tenant displaces another's fair part."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.retention import Retention
from tests.engine.scheduling.set_cache import SetCache


def cached_pool(num_blocks: int, max_retained: int) -> tuple[BlockPool, list[int]]:
    """Returns a pool whose blocks are all cached, the first one least recently used."""
    cache = SetCache()
    pool = BlockPool(num_blocks, cache, max_retained)
    blocks = [(pool.try_allocate(1) or [-1])[0] for _ in range(num_blocks)]
    cache.blocks.update(blocks)
    for block_id in blocks:
        pool.release([block_id])
    return pool, blocks


def taken(pool: BlockPool, count: int) -> list[int]:
    return [(pool.try_allocate(1) or [-1])[0] for _ in range(count)]


def test_retained_blocks_make_room_last_but_they_do() -> None:
    pool, blocks = cached_pool(4, max_retained=2)
    pool.retain(blocks[:2], "a", 10.0)
    assert pool.num_available == pool.stats.cached == 4
    assert taken(pool, 4) == [blocks[2], blocks[3], blocks[1], blocks[0]]


def test_a_held_block_is_retained_when_it_is_given_back() -> None:
    pool, blocks = cached_pool(3, max_retained=1)
    pool.try_allocate(0, [blocks[0]])
    pool.retain([blocks[0]], "a", 10.0)
    pool.release([blocks[0]])
    assert taken(pool, 3) == [blocks[1], blocks[2], blocks[0]]


def test_nothing_is_retained_beyond_its_time() -> None:
    pool, blocks = cached_pool(3, max_retained=2)
    pool.retain([blocks[0]], "a", 10.0)
    pool.retain([blocks[1]], "a", 20.0)
    pool.retain([blocks[1]], "a", 5.0)  # shortens nothing
    pool.expire(9.9)
    assert (pool.deadline_s(blocks[0]), pool.deadline_s(blocks[1])) == (10.0, 20.0)
    pool.expire(10.0)
    assert (pool.deadline_s(blocks[0]), pool.deadline_s(blocks[1])) == (None, 20.0)
    pool.expire(20.0)
    assert pool.deadline_s(blocks[1]) is None
    assert taken(pool, 3) == [blocks[2], blocks[0], blocks[1]]


def test_of_too_long_a_prompt_the_beginning_is_retained() -> None:
    pool, blocks = cached_pool(5, max_retained=2)
    pool.retain(blocks[:4], "a", 10.0)
    assert [block_id for block_id in blocks if pool.deadline_s(block_id)] == blocks[:2]
    assert pool.stats.cached == 5


def test_where_nothing_may_be_retained_nothing_is() -> None:
    pool, blocks = cached_pool(2, max_retained=0)
    pool.retain(blocks, "a", 10.0)
    assert [pool.deadline_s(block_id) for block_id in blocks] == [None, None]
    assert taken(pool, 2) == [blocks[1], blocks[0]] and pool.stats.held == 2


def test_one_that_asks_for_much_displaces_its_own() -> None:
    retention = Retention(4)
    assert retention.retain(0, "a", 10.0) == retention.retain(1, "a", 10.0) == []
    given_up = [block_id for new in range(2, 12) for block_id in retention.retain(new, "b", 10.0)]
    assert given_up == [*range(2, 10)] and 0 in retention and 1 in retention


def test_a_block_that_is_given_up_is_cached_as_others_are() -> None:
    pool, blocks = cached_pool(4, max_retained=2)
    for block_id in (blocks[1], blocks[0], blocks[2]):
        pool.retain([block_id], "a", 10.0)
    assert pool.try_allocate(0, [blocks[1]]) == [blocks[1]]
    pool.release([blocks[1]])
    assert taken(pool, 4) == [blocks[3], blocks[1], blocks[0], blocks[2]]


def test_dropped_blocks_are_free_unless_they_are_held() -> None:
    pool, blocks = cached_pool(3, max_retained=2)
    pool.retain(blocks[:2], "a", 10.0)
    pool.try_allocate(0, [blocks[2]])
    pool.drop(blocks)
    stats = pool.stats
    assert (stats.free, stats.held, stats.cached) == (2, 1, 0) and pool.deadline_s(blocks[0]) is None
    pool.release([blocks[2]])
    assert pool.stats.free == 3


class RetainingPoolMachine(RuleBasedStateMachine):
    """The pool with retained blocks against a plain model: deadlines by block."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SetCache()
        self.pool = BlockPool(10, self.cache, max_retained=3)
        self.tables: list[list[int]] = []
        self.deadlines: dict[int, float] = {}
        self.now_s = 0.0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        others = {block_id for block_id in self.cache.blocks if not self.pool.ref_count(block_id)} - set(self.deadlines)
        free = self.pool.stats.free
        blocks = self.pool.try_allocate(count) or []
        assert not (set(blocks) & set(self.deadlines)) or count > len(others) + free, "a retained block went too early"
        for block_id in blocks:
            self.deadlines.pop(block_id, None)
        self.tables += [blocks] if blocks else []

    @rule(index=st.integers(0, 100))
    def share(self, index: int) -> None:
        if self.cache.blocks:
            block_id = sorted(self.cache.blocks)[index % len(self.cache.blocks)]
            self.tables.append(self.pool.try_allocate(0, [block_id]) or [])

    @rule(index=st.integers(0, 100), is_cached=st.booleans(), length=st.integers(0, 3), tenant=st.sampled_from("ab"))
    def release(self, index: int, is_cached: bool, length: int, tenant: str) -> None:
        if not self.tables:
            return
        table = self.tables.pop(index % len(self.tables))
        if is_cached:
            self.cache.blocks.update(table)
            self.pool.retain(table[:length], tenant, self.now_s + length)
            until_s = self.now_s + length
            asked = self.deadlines | {block: max(until_s, self.deadlines.get(block, 0.0)) for block in table[:length]}
            self.deadlines = {block: until for block, until in asked.items() if self.pool.deadline_s(block) is not None}
            assert len(self.deadlines) >= min(len(asked), 3)
        self.pool.release(table)

    @rule(seconds=st.integers(0, 2))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        self.pool.expire(self.now_s)
        self.deadlines = {block: until for block, until in self.deadlines.items() if until > self.now_s}

    @rule(block_ids=st.sets(st.integers(0, 9)))
    def drop(self, block_ids: set[int]) -> None:
        dropped = block_ids & self.cache.blocks
        self.pool.drop(list(dropped))
        assert not dropped & self.cache.blocks
        self.deadlines = {block: until for block, until in self.deadlines.items() if block not in dropped}

    @rule()
    def clear(self) -> None:
        held = {block for table in self.tables for block in table}
        self.pool.clear_cache()
        self.cache.blocks.clear()
        self.deadlines.clear()
        assert self.pool.stats.held == len(held) and self.pool.stats.cached == 0

    @invariant()
    def what_is_retained_is_what_was_asked_for(self) -> None:
        found = {block: until for block in range(10) if (until := self.pool.deadline_s(block)) is not None}
        assert found == self.deadlines and len(found) <= 3
        assert set(found) <= self.cache.blocks

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        counts = Counter(block for table in self.tables for block in table)
        assert [self.pool.ref_count(block) for block in range(10)] == [counts[block] for block in range(10)]
        stats = self.pool.stats
        assert stats.free + stats.held + stats.cached == 10 and stats.held == len(counts)
        assert stats.cached == sum(1 for block in self.cache.blocks if not counts[block])
        assert self.pool.num_available == stats.free + stats.cached


TestRetainingPoolMachine = RetainingPoolMachine.TestCase
