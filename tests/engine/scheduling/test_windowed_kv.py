"""Blocks before the window are given back where no later token sees them, and found again where they still are."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.cache_steering import CacheSteering
from engine.core.kv_groups import ONE_GROUP, KVGroups, groups_of
from engine.core.request import Request
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.block_tokens import SortedBlockTokens
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.prefix_cache import BlockCache, NullPrefixCache, PrefixCache
from tests.engine.fakes import FakeRunner, add, expected_tokens, fake_engine, run_to_end
from tests.engine.requests import queued
from tests.fuzz import num_examples

BLOCK_SIZE = 4
WINDOW = 6
ALL = groups_of([WINDOW, WINDOW])
MIXED = groups_of([WINDOW, None, WINDOW])
GEMMA = groups_of(([512] * 5 + [None]) * 4 + [512] * 2)
"""The layers of Gemma 3 1B: 26, of which each sixth sees everything."""


def request_of(num_tokens: int, first: int = 0) -> Request:
    return queued("r", [first, *range(1, num_tokens)])


def allocator(
    groups: KVGroups = MIXED, num_blocks: int = 60, max_chunk: int = 8, cache: BlockCache | None = None
) -> KVAllocator:
    tokens = SortedBlockTokens()
    cache = PrefixCache(BLOCK_SIZE, num_groups=groups.num_groups, tokens=tokens) if cache is None else cache
    return KVAllocator(num_blocks, BLOCK_SIZE, cache, tables=BlockTables(BLOCK_SIZE, groups, max_chunk))


def started(kv: KVAllocator, request: Request) -> Request:
    assert kv.try_start(request, kv.match(request), spare=0)
    return request


def compute(kv: KVAllocator, request: Request, max_chunk: int = 8) -> None:
    """Computes all tokens of the request, in chunks."""
    while request.num_computed_tokens < request.num_tokens:
        assert kv.try_allocate(request)
        start = request.num_computed_tokens
        kv.computed(request, start, min(request.num_tokens, start + max_chunk))


def blocks_at_most(groups: KVGroups, num_tokens: int, max_chunk: int) -> tuple[int, int]:
    """Returns the most blocks that a context of so many tokens holds while it is computed, and those that it holds
    then, to compute the next one."""
    kv = KVAllocator(10**5, 16, NullPrefixCache(), tables=BlockTables(16, groups, max_chunk))
    request, most = started(kv, request_of(num_tokens)), 0
    while request.num_computed_tokens < num_tokens:
        assert kv.try_allocate(request)
        most = max(most, kv.stats.held)
        start = request.num_computed_tokens
        kv.computed(request, start, min(num_tokens, start + max_chunk))
    assert request.num_blocks == kv.stats.held
    return most, kv.stats.held


def test_a_long_context_takes_what_its_windows_need() -> None:
    """In units of a token's KV in one layer: 26 layers of 32,000 tokens take 832,000 of them if nothing is freed."""
    size = 4  # layers of a block
    most, held = blocks_at_most(GEMMA, 32_000, 2048)
    assert GEMMA.num_groups == 7 and size * 16 * most == 64 * (2000 + 6 * 160) == 189_440
    assert size * 16 * held == 64 * (2000 + 6 * 32) == 140_288
    before, _ = blocks_at_most(ONE_GROUP, 32_000, 2048)
    assert 26 * 16 * before == 832_000
    assert most <= GEMMA.num_blocks(32_000, 16, 2048) <= most + 6


def test_a_model_of_windows_alone_takes_no_more_for_a_longer_context() -> None:
    groups = groups_of([4096] * 32)
    assert [blocks_at_most(groups, length, 2048) for length in (16_384, 131_072)] == [(384, 256)] * 2


@pytest.mark.parametrize("groups", [ALL, MIXED], ids=["all", "mixed"])
def test_a_continued_text_is_found_to_its_end(groups: KVGroups) -> None:
    kv = allocator(groups)
    first = started(kv, request_of(41))
    compute(kv, first)
    assert first.num_hidden_blocks == 9
    kv.free(first)
    assert kv.stats.held == 0
    second = started(kv, request_of(43))
    assert second.num_computed_tokens == 40 and second.num_hidden_blocks == 8
    assert len({*second.block_table[8:]}) == 3 and all(second.block_table[index] >= 0 for index in range(11))


def test_without_the_blocks_of_the_window_a_prefix_is_not_found() -> None:
    kv = allocator()
    first = started(kv, request_of(41))
    compute(kv, first)
    kv.free(first)
    (block,) = [kv._cache.find(first, 8, 2)]
    assert block is not None
    kv._pool.drop([block])
    second = request_of(43)
    assert kv.match(second).num_blocks == 8, "before that block everything is there"
    for index in range(7):
        block = kv._cache.find(first, index, 1)
        assert block is not None
        kv._pool.drop([block])
    third = kv._cache.find(first, 7, 1)
    assert third is not None and kv.match(second).num_blocks == 0
    assert len(kv._cache.match(second, 10)) == 10, "the first group has all"


@settings(max_examples=300, deadline=None)
@given(
    groups=st.sampled_from([groups_of([w, *more]) for w in (1, 2, 4, 5, 6, 9) for more in ([], [None])]),
    lost=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 9))),
    num_tokens=st.integers(1, 44),
)
def test_the_deepest_prefix_is_found_of_which_all_that_is_seen_is_there(
    groups: KVGroups, lost: set[tuple[int, int]], num_tokens: int
) -> None:
    kv = allocator(groups)
    first = started(kv, request_of(41))
    compute(kv, first)
    kv.free(first)
    there = {(group, index) for group in range(groups.num_groups) for index in range(10)} - lost
    for group, index in lost:
        block = kv._cache.find(first, index, group) if group < groups.num_groups else None
        if block is not None:
            kv._pool.drop([block])

    def is_whole(depth: int) -> bool:
        seen = groups.first_visible_block(depth * BLOCK_SIZE, BLOCK_SIZE)
        begins = [0] * groups.num_full + [seen] * groups.num_windowed
        return all((group, index) in there for group, begin in enumerate(begins) for index in range(begin, depth))

    deepest = max(depth for depth in range(min(10, (num_tokens - 1) // BLOCK_SIZE) + 1) if is_whole(depth))
    assert kv.match(request_of(num_tokens)).num_blocks == deepest


def test_a_part_of_a_block_is_copied_in_all_groups() -> None:
    kv = allocator()
    first = started(kv, request_of(41))
    compute(kv, first)
    kv.free(first)
    second = started(kv, queued("r", [*first.asked.prompt_token_ids[:39], 99]))
    sources = [kv._cache.find(first, 9, group) for group in range(MIXED.num_groups)]
    tables = [second.block_table, *second.window_tables]
    assert second.num_computed_tokens == 39
    assert second.block_copies == tuple((source, table[9]) for source, table in zip(sources, tables, strict=True))
    kv.free(second)
    assert sources[2] is not None
    kv._pool.drop([sources[2]])
    assert kv.match(second).num_tokens(BLOCK_SIZE) == 36, "one group has computed it no longer"


def test_tokens_are_told_of_that_all_groups_have() -> None:
    cache = PrefixCache(BLOCK_SIZE, num_groups=MIXED.num_groups)
    kv = KVAllocator(60, BLOCK_SIZE, cache, max_retained=4, tables=BlockTables(BLOCK_SIZE, MIXED, 8))
    first = started(kv, queued("r", range(41), steering=CacheSteering(retain_s=9.0)))
    compute(kv, first)
    kv.free(first)
    (told,) = kv.cached_prefixes("", 0.0)
    assert (told.num_tokens, told.num_memory_tokens, told.num_retained_tokens) == (40, 40, BLOCK_SIZE)
    (lost,) = [cache.find(first, 5, 2)]
    assert lost is not None
    kv._pool.drop([lost])
    (told,) = kv.cached_prefixes("", 0.0)
    assert (told.num_tokens, told.num_memory_tokens) == (36, 36)


def test_dropping_a_prefix_drops_it_in_all_groups() -> None:
    kv = allocator()
    first = started(kv, request_of(21))
    compute(kv, first)
    kv.free(first)
    assert kv.stats.cached == 15
    kv.drop_prefixes("", None)
    assert kv.stats.cached == 0 and kv.match(request_of(21)).num_blocks == 0


def test_no_room_for_the_blocks_of_later_chunks_is_no_room() -> None:
    """21 tokens take 6 blocks of the first group and, after the first chunk of 8, up to 5 of each of the others."""
    assert MIXED.num_blocks(21, BLOCK_SIZE, 8) == 16
    request = request_of(21)
    kv = allocator(num_blocks=15)
    assert not kv.try_start(request, kv.match(request), spare=0)
    assert kv.stats.held == 0 and request.block_table == [] == request.window_tables
    started(allocator(num_blocks=16), request)


def test_long_prompts_take_turns_where_not_all_fit() -> None:
    """Each alone fits; together they preempt one another, and all end with the answers of each alone."""
    engine = fake_engine(40, 4, kv_groups=MIXED, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = {str(index): [index, *range(2, 40)] for index in range(5)}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=12)
    updates = run_to_end(engine)
    for name, prompt in prompts.items():
        tokens = [token for update in updates[name] for token in update.token_ids]
        assert tokens == expected_tokens(prompt, 12)
    assert engine._scheduler.stats.pool.held == 0


def test_a_turn_of_a_conversation_computes_what_is_new() -> None:
    engine = fake_engine(60, 4, kv_groups=MIXED, max_num_batched_tokens=16)
    text = list(range(1, 38))
    for turn, more in enumerate(([], [7, 8, 9], [3, 4])):
        text += more
        hits = engine._scheduler.stats.prefix_hits
        add(engine, str(turn), text, max_tokens=6)
        updates = run_to_end(engine)[str(turn)]
        found = engine._scheduler.stats.prefix_hits - hits
        assert found == (0 if turn == 0 else (len(text) - len(more) - 1) // 4 * 4)
        text += [token for update in updates for token in update.token_ids]
    assert isinstance(engine._runner, FakeRunner)


class WindowedMachine(RuleBasedStateMachine):
    """Requests start, grow, draft, are computed, trimmed and freed in any order."""

    groups = MIXED
    num_blocks = 40

    @initialize()
    def make(self) -> None:
        self.kv = allocator(self.groups, self.num_blocks)
        self.running: list[Request] = []

    def snapshot(self) -> object:
        tables = [([*each.block_table], [[*table] for table in each.window_tables]) for each in self.running]
        return self.kv.stats, tables, [each.num_hidden_blocks for each in self.running]

    @rule(num_tokens=st.integers(1, 40), first=st.integers(0, 1), spare=st.integers(0, 3))
    def start(self, num_tokens: int, first: int, spare: int) -> None:
        before, request = self.snapshot(), request_of(num_tokens, first)
        if self.kv.try_start(request, self.kv.match(request), spare):
            assert self.kv.stats.free + self.kv.stats.cached >= spare
            assert request.num_computed_tokens < request.num_tokens
            self.running.append(request)
        else:
            assert self.snapshot() == before and request.block_table == [] == request.window_tables

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_drafts=st.integers(0, 3), count=st.integers(1, 8), spare=st.integers(0, 2))
    def step(self, data: st.DataObject, num_drafts: int, count: int, spare: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        before = self.snapshot()
        if not self.kv.try_allocate(request, num_drafts, spare):
            assert self.snapshot() == before
            return
        start = request.num_computed_tokens
        end = min(start + count, request.num_tokens)
        assert all(len(table) * BLOCK_SIZE >= end for table in (request.block_table, *request.window_tables))
        self.kv.computed(request, start, end)
        if end == request.num_tokens:
            request.output_token_ids.append(7)
            self.kv.trim(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.kv.free(request)
        self.running = [each for each in self.running if each is not request]
        assert (request.block_table, request.window_tables, request.num_hidden_blocks) == ([], [], 0)

    @invariant()
    def blocks_add_up(self) -> None:
        stats = self.kv.stats
        assert stats.free + stats.held + stats.cached == self.num_blocks
        held = [block for each in self.running for block in self.visible(each)]
        held += [source for each in self.running for source, _ in each.block_copies]
        assert stats.held == len({*held})
        assert all(self.kv._pool.ref_count(block) == held.count(block) for block in range(self.num_blocks))

    @invariant()
    def no_two_places_of_a_request_share_a_block(self) -> None:
        for each in self.running:
            blocks = sorted(self.visible(each))
            assert all(one != other for one, other in pairwise(blocks)) and len(blocks) == each.num_blocks

    @invariant()
    def what_a_token_can_see_is_held(self) -> None:
        for each in self.running:
            first_seen = self.groups.first_visible_block(each.num_computed_tokens, BLOCK_SIZE)
            assert each.num_hidden_blocks <= first_seen
            assert first_seen - each.num_hidden_blocks <= 1, "no more is kept than the block at the window's begin"

    def visible(self, request: Request) -> list[int]:
        tables = [request.block_table, *request.window_tables]
        hidden = [0] * self.groups.num_full + [request.num_hidden_blocks] * self.groups.num_windowed
        return [block for table, first in zip(tables, hidden, strict=True) for block in table[first:]]


class AllWindowedMachine(WindowedMachine):
    groups = ALL
    num_blocks = 14


TestWindowedMachine = pytest.mark.fuzz(WindowedMachine.TestCase)
TestWindowedMachine.settings = settings(max_examples=num_examples(40), stateful_step_count=40, deadline=None)
TestAllWindowedMachine = pytest.mark.fuzz(AllWindowedMachine.TestCase)
TestAllWindowedMachine.settings = settings(max_examples=num_examples(40), stateful_step_count=40, deadline=None)
