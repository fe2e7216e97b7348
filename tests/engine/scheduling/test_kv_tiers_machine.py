"""Blocks, states, windows and answers with a KV store, whatever ends, fails and is aborted in whatever order."""

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.assembly import assemble
from engine.core.batch import BlockTransfer, Direction, StateTransfer, Transfer
from engine.core.config import EngineConfig
from engine.core.kv_groups import ONE_GROUP, KVGroups, groups_of
from engine.core.messages import RequestUpdate
from engine.core.request import Request, RequestStatus
from engine.scheduling.block_tables import tables_of
from engine.scheduling.kv_tiers import TieredKVAllocator
from engine.scheduling.state_tiers import TieredCheckpoints
from tests.engine.fakes import FakeRunner, add, expected_tokens, fake_info, run_to_end
from tests.engine.scheduling.fake_store import FakeStore
from tests.fuzz import num_examples

NUM_CHECKPOINTS = 3


class KVTiersMachine(RuleBasedStateMachine):
    """The runner checks that a step reads a request's own KV alone; the store, that none changes while it is stored."""

    num_blocks = 12
    groups: ClassVar[KVGroups] = ONE_GROUP
    facts: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore(FakeRunner(2))
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.alive: list[str] = []
        self.now_s = 0.0
        self.start_engine()

    def start_engine(self) -> None:
        runner = FakeRunner(2, groups=self.groups)
        self.store = FakeStore(runner, self.store.stored)
        self.store.is_held_up = True
        limits = {"max_num_seqs": 3, "max_num_batched_tokens": 7, "state_checkpoint_interval": 4}
        config = EngineConfig(model="fake", block_size=2, **limits)
        info = fake_info(self.num_blocks, 2, kv_groups=self.groups, **self.facts)
        self.engine = assemble(config, info, runner, clock=lambda: self.now_s, store=self.store)
        tiers = self.engine._scheduler._kv
        assert isinstance(tiers, TieredKVAllocator)
        self.tiers = tiers
        self.tiers._read_s = self.tiers._read_states_s = 0.0  # nothing takes time here

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=11),
        max_tokens=st.integers(1, 8),
        salt=st.sampled_from(["", "", "x"]),
        until_stored=st.booleans(),
        num_announced_tokens=st.sampled_from([0, 0, 4]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, salt: str, **other_server: int) -> None:
        name = str(len(self.prompts))
        add(self.engine, name, prompt, max_tokens=max_tokens, cache_salt=salt, **other_server)
        self.prompts[name], self.outputs[name] = prompt, []
        self.alive.append(name)

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.0, 20.0]))
    def step(self, seconds: float) -> None:
        self.now_s += seconds
        if self.engine.has_work:
            self._account(self.engine.step().updates)

    @precondition(lambda self: self.store.under_way)
    @rule(index=st.integers(0, 100), succeeded=st.sampled_from([True, True, True, False]))
    def end_a_transfer(self, index: int, succeeded: bool) -> None:
        self.store.end(index % len(self.store.under_way), succeeded)

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        self.engine.abort_requests([self.alive.pop(index % len(self.alive))])

    @rule(clears_store=st.booleans())
    def reset(self, clears_store: bool) -> None:
        self.engine.reset_prefix_cache(clears_store)

    @precondition(lambda self: not self.alive)
    @rule()
    def start_anew(self) -> None:
        self.start_engine()

    def _account(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.outputs[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.alive.remove(update.request_id)

    @invariant()
    def answers_are_those_without_a_store(self) -> None:
        for name, output in self.outputs.items():
            assert output == expected_tokens(self.prompts[name], len(output))

    @invariant()
    def blocks_are_held_by_requests_and_transfers_alone(self) -> None:
        tiers = self.tiers
        held = Counter(block for each in self.engine._scheduler._requests.values() for block in self.held_by(each))
        held.update(block for load in set(tiers._loads.values()) for block in load.block_ids)
        transfers = self.transfers()
        blocks = [each for each in transfers if isinstance(each, BlockTransfer)]
        held.update(each.block_id for each in blocks if each.direction is Direction.STORE)
        blocks_of_all = range(self.num_blocks)
        assert [tiers._pool.ref_count(block) for block in blocks_of_all] == [held[block] for block in blocks_of_all]
        assert tiers.stats.free + tiers.stats.held + tiers.stats.cached == self.num_blocks

    def held_by(self, request: Request) -> list[int]:
        """Returns the blocks that the request has, in all groups, and those that it is to copy."""
        hidden = [0] * self.groups.num_full + [request.num_hidden_blocks] * self.groups.num_windowed
        tables = tables_of(request) if request.block_table else []
        held = [block for table, first in zip(tables, hidden, strict=False) for block in table[first:]]
        return held + [source for source, _ in request.block_copies]

    def transfers(self) -> list[Transfer]:
        """Returns the transfers that the engine does not know to have ended."""
        return [*self.store.under_way, *(each.transfer for each in self.store._ended)]

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        scheduler, hand_overs = self.engine._scheduler, self.engine._hand_overs
        assert {*scheduler._requests, *hand_overs._held} == set(self.alive)
        assert not scheduler._requests.keys() & hand_overs._held.keys()
        assert hand_overs._held.keys() <= hand_overs._requests.keys() <= set(self.alive)
        statuses = Counter(request.status for request in scheduler._requests.values())
        assert statuses[RequestStatus.LOADING] == len(scheduler._loading)
        assert statuses[RequestStatus.RUNNING] == len(scheduler._running)
        assert statuses[RequestStatus.WAITING] == len(scheduler._waiting)

    def teardown(self) -> None:
        self.store.is_held_up = False
        self._account([update for updates in run_to_end(self.engine).values() for update in updates])
        assert not self.alive and not self.store.under_way
        assert self.engine._scheduler.stats.pool.held == 0


class StatefulKVTiersMachine(KVTiersMachine):
    """The same for a model with recurrent states; the runner checks that each step goes on from the right ones."""

    facts: ClassVar[dict[str, Any]] = {"num_state_slots": 3, "num_state_checkpoints": NUM_CHECKPOINTS}

    @invariant()
    def slots_of_copies_are_held_by_requests_and_transfers_alone(self) -> None:
        states = self.tiers._states
        assert isinstance(states, TieredCheckpoints)
        moved = [each for each in self.transfers() if isinstance(each, StateTransfer)]
        restored = [each.restored_slot for each in self.engine._scheduler._requests.values()]
        pinned = Counter(each for each in restored if each is not None)
        pinned.update(each.slot for each in moved if each.direction is Direction.STORE)
        assert states._num_pins == pinned
        assert sorted(states._pending) == sorted(each.slot for each in moved if each.direction is Direction.LOAD)
        assert states.num_free + states.num_pending + states.num_kept == NUM_CHECKPOINTS
        assert not states._made

    def teardown(self) -> None:
        super().teardown()
        assert not self.tiers._states.has_stores


class WindowedKVTiersMachine(KVTiersMachine):
    """The same for a model of which some layers see a window, each group of them with a block table of its own."""

    num_blocks = 36
    groups: ClassVar[KVGroups] = groups_of([5, None, 5])


class AllWindowedKVTiersMachine(KVTiersMachine):
    """The same for a model all of whose layers see a window."""

    groups: ClassVar[KVGroups] = groups_of([3, 3])


TestKVTiersMachine = pytest.mark.fuzz(KVTiersMachine.TestCase)
TestKVTiersMachine.settings = settings(max_examples=num_examples(32), stateful_step_count=40, deadline=None)
TestStatefulKVTiersMachine = pytest.mark.fuzz(StatefulKVTiersMachine.TestCase)
TestStatefulKVTiersMachine.settings = settings(max_examples=num_examples(32), stateful_step_count=40, deadline=None)
TestWindowedKVTiersMachine = pytest.mark.fuzz(WindowedKVTiersMachine.TestCase)
TestWindowedKVTiersMachine.settings = settings(max_examples=num_examples(32), stateful_step_count=40, deadline=None)
TestAllWindowedKVTiersMachine = pytest.mark.fuzz(AllWindowedKVTiersMachine.TestCase)
TestAllWindowedKVTiersMachine.settings = settings(max_examples=num_examples(24), stateful_step_count=40, deadline=None)
