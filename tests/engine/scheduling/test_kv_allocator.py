"""Block tables change in the allocator alone: it gives enough, its refusals change nothing, and all comes back."""

from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.request import Request
from engine.scheduling.block_tokens import SortedBlockTokens
from engine.scheduling.kv_allocator import KVAllocator, PrefixMatch
from engine.scheduling.prefix_cache import BlockCache, NullPrefixCache, PrefixCache
from engine.scheduling.request_shares import drafted_share
from engine.scheduling.speculation.planner import PlannedDraft
from engine.scheduling.state_slots import StateSlots
from tests.engine.requests import queued

BLOCK_SIZE = 4
NUM_BLOCKS = 10


def request_of(num_tokens: int) -> Request:
    """Requests of a few texts: one is the beginning of another, or they share nothing."""
    first = num_tokens % 3
    return queued("r", [first, *range(1, num_tokens)])


def allocator(cache: BlockCache | None = None) -> KVAllocator:
    cache = PrefixCache(BLOCK_SIZE, tokens=SortedBlockTokens()) if cache is None else cache
    return KVAllocator(NUM_BLOCKS, BLOCK_SIZE, cache)


def started(kv: KVAllocator, num_tokens: int) -> Request:
    request = request_of(num_tokens)
    assert kv.try_start(request, kv.match(request), spare=0)
    return request


def test_a_match_leaves_a_token_to_compute() -> None:
    kv = allocator()
    first = started(kv, 9)
    kv.computed(first, 0, 9)
    assert kv.match(request_of(9)) == PrefixMatch(2, (tuple(first.block_table[:2]),))
    other = queued("r", first.asked.prompt_token_ids[:8])
    assert kv.match(other) == PrefixMatch(1, ((first.block_table[0],),), None, (first.block_table[1],), 3)


def test_a_prefix_is_shared_and_counted_once() -> None:
    kv = allocator()
    first = started(kv, 9)
    kv.computed(first, 0, 9)
    second = started(kv, 9)
    assert second.num_computed_tokens == 8 and second.block_table[:2] == first.block_table[:2]
    assert kv.stats.held == 4 and (kv.prefix_queries, kv.prefix_hits) == (18, 8)


def remembered(kv: KVAllocator) -> set[bytes]:
    """Returns the hashes of the blocks whose tokens are remembered."""
    assert isinstance(kv._cache, PrefixCache) and isinstance(kv._cache._tokens, SortedBlockTokens)
    return set(kv._cache._tokens._place_of)


def test_the_first_tokens_of_a_block_are_copied() -> None:
    kv = allocator()
    first = started(kv, 13)
    kv.computed(first, 0, 13)
    kv.free(first)
    second = queued("r", [*first.asked.prompt_token_ids[:7], 99, 99, 99])
    assert kv.try_start(second, kv.match(second), spare=0)
    assert second.num_computed_tokens == 7 == kv.prefix_hits and len(second.block_table) == 3
    ((source, own),) = second.block_copies
    assert kv._cache.holds(source) and own == second.block_table[1] != source
    assert kv._pool.ref_count(source) == 1, "nobody may write it yet"
    kv.computed(second, 7, 10)
    assert kv._pool.ref_count(source) == 0 and second.block_copies == ()
    assert kv.stats.held == 3 and kv.stats.cached == 2


def test_what_a_request_would_have_copied_is_given_back_with_the_rest() -> None:
    kv = allocator()
    kv.computed(started(kv, 9), 0, 9)
    request = queued("r", [0, 1, 2, 3, 4, 5, 99, 99])
    assert kv.try_start(request, kv.match(request), spare=0) and request.block_copies
    kv.free(request)
    assert kv.stats.held == 3 and request.block_copies == ()


def test_a_draft_model_does_not_run_before_its_blocks_are_copied() -> None:
    kv = allocator()
    kv.computed(started(kv, 9), 0, 9)
    request = queued("r", [0, 1, 2, 3, 4, 5], output_token_ids=[6])
    assert kv.try_start(request, kv.match(request), spare=0) and not request.needs_prefill
    share = drafted_share(kv, request, PlannedDraft((7,), 3), spare=0)
    assert (share.start, share.block_copies, share.num_wanted) == (6, request.block_copies, 0)
    assert [*share.token_ids] == [6, 7], "drafts that take no model"
    kv.computed(request, 6, 7)
    assert drafted_share(kv, request, PlannedDraft((7,), 3), spare=0).num_wanted == 3


def test_without_room_for_what_is_copied_it_is_computed() -> None:
    kv = allocator()
    first = started(kv, 9)
    kv.computed(first, 0, 9)
    kv.free(first)
    request = queued("r", [0, 1, 2, 3, 4, 5, *range(50, 84)])
    assert kv.try_start(request, kv.match(request), spare=0)
    assert len(request.block_table) == NUM_BLOCKS and request.num_computed_tokens == 4 and not request.block_copies


def test_few_tokens_are_not_worth_a_copy() -> None:
    kv = KVAllocator(NUM_BLOCKS, 16, PrefixCache(16, tokens=SortedBlockTokens()))
    first = started(kv, 17)
    kv.computed(first, 0, 17)
    for num_equal, num_copied in ((3, 0), (4, 4), (15, 15)):
        request = queued("r", [*first.asked.prompt_token_ids[:num_equal], 99, 99])
        assert kv.match(request).num_copied_tokens == num_copied


def test_parts_of_blocks_have_salts_too() -> None:
    kv = allocator()
    kv.computed(started(kv, 9), 0, 9)
    assert kv.match(queued("r", [0, 1, 2, 99])).num_copied_tokens == 3
    assert kv.match(queued("r", [0, 1, 2, 99], cache_salt="other")) == PrefixMatch()
    kv.reset()
    assert kv.match(queued("r", [0, 1, 2, 99])) == PrefixMatch() and remembered(kv) == set()


def test_what_is_freed_is_still_found() -> None:
    kv = allocator()
    first = started(kv, 9)
    kv.computed(first, 0, 9)
    kv.free(first)
    assert kv.stats.held == 0 and kv.stats.cached == 2
    assert started(kv, 9).num_computed_tokens == 8


def test_rejected_draft_tokens_are_not_found() -> None:
    kv = allocator()
    request = started(kv, 6)
    assert kv.try_allocate(request, num_drafts=5) and kv.surplus(request) == 6
    kv.computed(request, 0, 6)  # of eleven positions that the step wrote
    kv.trim(request)
    assert len(request.block_table) == 2 and kv.match(request_of(12)).num_blocks == 1


def test_a_request_that_lacks_no_block_needs_no_spare_ones() -> None:
    kv = allocator()
    request = started(kv, 11)
    assert kv.try_allocate(request, num_drafts=1, spare=10**6) and len(request.block_table) == 3
    assert not kv.try_allocate(request, num_drafts=2, spare=10**6) and len(request.block_table) == 3


def test_without_a_cache_nothing_is_found() -> None:
    kv = allocator(NullPrefixCache())
    first = started(kv, 9)
    kv.computed(first, 0, 9)
    assert kv.match(request_of(9)) == PrefixMatch() and kv.prefix_queries == 0


def test_a_request_runs_only_with_a_slot_for_its_states() -> None:
    kv = KVAllocator(NUM_BLOCKS, BLOCK_SIZE, NullPrefixCache(), StateSlots(2))
    first, second = started(kv, 3), started(kv, 3)
    assert {first.state_slot, second.state_slot} == {0, 1}
    third = request_of(3)
    assert not kv.try_start(third, kv.match(third), spare=0)
    assert third.state_slot is None and third.block_table == [] and kv.stats.held == 2
    slot = first.state_slot
    kv.free(first)
    assert first.state_slot is None
    assert kv.try_start(third, kv.match(third), spare=0) and third.state_slot == slot


def test_without_enough_blocks_no_slot_is_taken() -> None:
    slots = StateSlots(2)
    kv = KVAllocator(NUM_BLOCKS, BLOCK_SIZE, NullPrefixCache(), slots)
    request = request_of(BLOCK_SIZE * NUM_BLOCKS + 1)
    assert not kv.try_start(request, kv.match(request), spare=0)
    assert request.state_slot is None and (slots.num_free, slots.num_held) == (2, 0)


def held_by(request: Request) -> list[int]:
    return [*request.block_table, *(source for source, _ in request.block_copies)]


class KVAllocatorMachine(RuleBasedStateMachine):
    """Requests start, grow, draft, are computed, trimmed and freed in any order."""

    @initialize()
    def make(self) -> None:
        self.kv = allocator()
        self.running: list[Request] = []

    def snapshot(self) -> object:
        return self.kv.stats, [list(each.block_table) for each in self.running]

    @rule(num_tokens=st.integers(1, 24), spare=st.integers(0, 3))
    def start(self, num_tokens: int, spare: int) -> None:
        before, request = self.snapshot(), request_of(num_tokens)
        if self.kv.try_start(request, self.kv.match(request), spare):
            assert self.kv.stats.free + self.kv.stats.cached >= spare
            assert request.num_computed_tokens < request.num_tokens
            num_shared, num_copied = divmod(request.num_computed_tokens, BLOCK_SIZE)
            assert [own for _, own in request.block_copies] == request.block_table[num_shared:][: min(num_copied, 1)]
            self.running.append(request)
        else:
            assert self.snapshot() == before and request.block_table == []

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_drafts=st.integers(0, 9), spare=st.integers(0, 2))
    def decode(self, data: st.DataObject, num_drafts: int, spare: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        before = self.snapshot()
        if not self.kv.try_allocate(request, num_drafts, spare):
            assert self.snapshot() == before
            return
        assert self.kv.surplus(request) >= num_drafts
        self.kv.computed(request, request.num_computed_tokens, request.num_tokens)
        self.kv.trim(request)
        assert len(request.block_table) == -(-request.num_tokens // BLOCK_SIZE)
        request.output_token_ids.append(7)
        if self.kv.surplus(request) < 0 and not self.kv.try_allocate(request):
            self.end(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.running)))

    def end(self, request: Request) -> None:
        self.kv.free(request)
        self.running = [each for each in self.running if each is not request]
        assert (request.block_table, request.block_copies, request.num_computed_tokens) == ([], (), 0)

    @invariant()
    def blocks_add_up(self) -> None:
        stats = self.kv.stats
        assert stats.free + stats.held + stats.cached == NUM_BLOCKS
        held = [*chain.from_iterable(map(held_by, self.running))]
        assert stats.held == len(set(held))
        assert all(self.kv._pool.ref_count(block) == held.count(block) for block in range(NUM_BLOCKS))

    @invariant()
    def tokens_are_remembered_of_cached_blocks_alone(self) -> None:
        cache = self.kv._cache
        assert isinstance(cache, PrefixCache) and remembered(self.kv) == set(cache._block_of_hash)

    @invariant()
    def blocks_that_are_still_written_belong_to_one_request(self) -> None:
        written = [
            block for each in self.running for block in each.block_table[each.num_computed_tokens // BLOCK_SIZE :]
        ]
        assert len(written) == len(set(written))


TestKVAllocatorMachine = KVAllocatorMachine.TestCase
TestKVAllocatorMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
