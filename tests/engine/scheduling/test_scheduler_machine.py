"""The scheduler's invariants, whatever happens in whatever order."""

from collections import Counter
from itertools import chain, cycle
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.kv_groups import ONE_GROUP, KVGroups, groups_of
from engine.core.messages import RequestUpdate
from engine.core.request import FinishReason, Request
from engine.scheduling.state_checkpoints import StateCheckpoints
from engine.scheduling.state_slots import StateSlots
from tests.engine.fakes import add, expected_tokens, run_to_end
from tests.engine.scheduling.speculation.prophets import oracle_drafters
from tests.engine.scheduling.speculation.timed import SilentDrafter, TimedRunner, drafting_engine
from tests.fuzz import num_examples


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, steps and drafts, of tenants that take turns often. The runner checks every read; the
    invariants check the blocks."""

    num_state_slots: int | None = None
    num_state_checkpoints = 0
    groups: KVGroups = ONE_GROUP
    num_blocks = 9

    def __init__(self) -> None:
        super().__init__()
        self.turns = (
            mock.patch.multiple("engine.scheduling.fair_turns", _SHORTEST_TURN=1),
            mock.patch("engine.scheduling.fair_queue._QUANTUM", 1.0),
        )
        for patch in self.turns:
            patch.start()
        errs = cycle([False, True, False, False, False]).__next__
        drafters = cycle([oracle_drafters(errs), SilentDrafter])
        self.engine = drafting_engine(
            TimedRunner(2, errs, self.groups),
            num_blocks=self.num_blocks,
            has_draft_weights=self.groups == ONE_GROUP,
            new_drafter=lambda: next(drafters)(),
            num_state_slots=self.num_state_slots,
            num_state_checkpoints=self.num_state_checkpoints,
            **({"draft_kv_bytes": 1, "has_head": True} if self.num_state_slots else {}),  # as those models have
            state_checkpoint_interval=4,
            max_num_seqs=4,
            max_num_batched_tokens=7,
            max_prefill_tokens_per_gap=3,
            num_speculative_tokens=3,
        )
        self.scheduler = self.engine._scheduler
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=8),
        max_tokens=st.integers(0, 8),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "x"]),
        tenant=st.sampled_from(["a", "b", "c"]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, priority: int, salt: str, tenant: str) -> None:
        name = str(len(self.prompts))
        add(self.engine, name, prompt, max_tokens=max_tokens, priority=priority, cache_salt=salt, tenant=tenant)
        self.prompts[name] = (prompt, max_tokens)
        self.outputs[name] = []

    @precondition(lambda self: len(self.ended) < len(self.prompts))
    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        self._end(self._pick(pick), FinishReason.ABORT)

    @rule()
    def step(self) -> None:
        if self.engine.has_work:
            had_unfinished = self.scheduler.has_unfinished
            update = self.engine.step()
            assert (update.stats.phase is not None) == had_unfinished, "work waits, but nothing was scheduled"
            self._account(update.updates)

    @precondition(lambda self: len(self.ended) < len(self.prompts))
    @rule(pick=st.integers(0, 100))
    def abort_between_schedule_and_update(self, pick: int) -> None:
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        output = self.engine._runner.prefill(batch)
        self._end(self._pick(pick), FinishReason.ABORT)
        self._account(self.scheduler.update(batch, output))

    @precondition(lambda self: len(self.ended) < len(self.prompts))
    @rule()
    def fail(self) -> None:
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        self._account(self.scheduler.fail(batch, "broken"))

    def _pick(self, pick: int) -> str:
        alive = [name for name in self.prompts if name not in self.ended]
        return alive[pick % len(alive)]

    def _end(self, name: str, reason: FinishReason) -> None:
        self.engine.abort_requests([name, "unknown"])
        self.ended[name] = reason

    def _account(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            name = update.request_id
            assert name not in self.ended, "an update after the end"
            self.outputs[name] += update.token_ids
            if update.finish_reason is not None:
                self.ended[name] = update.finish_reason
            if update.finish_reason is FinishReason.LENGTH:
                assert len(self.outputs[name]) == self.prompts[name][1]

    @invariant()
    def outputs_are_those_of_the_request_alone(self) -> None:
        for name, output in self.outputs.items():
            assert output == expected_tokens(self.prompts[name][0], len(output))

    @invariant()
    def blocks_are_held_by_exactly_the_running_requests(self) -> None:
        requests = self.scheduler._requests.values()
        held = Counter(block for request in requests for block in self.held_by(request))
        held.update(source for request in requests for source, _ in request.block_copies)
        pool = self.engine._scheduler._kv._pool
        for block in range(self.num_blocks):
            assert pool.ref_count(block) == held[block]
        stats = pool.stats
        assert stats.free + stats.held + stats.cached == self.num_blocks
        for request in requests:
            for table in (request.block_table, *request.window_tables):
                assert request.num_computed_tokens <= len(table) * 2 <= request.num_tokens + 1
                assert bool(table) == (request.status == "running")

    def held_by(self, request: Request) -> list[int]:
        return request.block_table

    @invariant()
    def the_unfinished_are_exactly_those_not_ended(self) -> None:
        assert set(self.scheduler._requests) == set(self.prompts) - set(self.ended)
        stats = self.scheduler.stats
        assert stats.num_running + stats.num_waiting == len(self.scheduler._requests)
        assert stats.num_running <= 4

    def teardown(self) -> None:
        try:
            self._run_to_end()
        finally:
            for patch in self.turns:
                patch.stop()

    def _run_to_end(self) -> None:
        self._account([update for updates in run_to_end(self.engine).values() for update in updates])
        assert set(self.ended) == set(self.prompts)
        assert self.engine._scheduler.stats.pool.held == 0


class StatefulSchedulerMachine(SchedulerMachine):
    """The same for a model with recurrent states, of which fewer fit than requests may run."""

    num_state_slots = 3

    @invariant()
    def slots_are_held_by_exactly_the_running_requests(self) -> None:
        slots = self.scheduler._kv._slots
        assert isinstance(slots, StateSlots) and slots.num_free + slots.num_held == 3
        held = [each.state_slot for each in self.scheduler._requests.values() if each.state_slot is not None]
        assert len(held) == len(set(held)) == slots.num_held
        for request in self.scheduler._requests.values():
            assert (request.state_slot is not None) == (request.status == "running")

    @invariant()
    def no_prefix_is_found_without_states(self) -> None:
        assert self.num_state_checkpoints or self.scheduler.stats.prefix_hits == 0

    def teardown(self) -> None:
        super().teardown()
        slots = self.scheduler._kv._slots
        assert isinstance(slots, StateSlots) and slots.num_held == 0


class CheckpointedSchedulerMachine(StatefulSchedulerMachine):
    """The same with copies of states, of which there are few; the runner checks what is copied."""

    num_state_checkpoints = 2

    @invariant()
    def copies_add_up(self) -> None:
        checkpoints = self.scheduler._kv._checkpoints
        assert isinstance(checkpoints, StateCheckpoints)
        assert checkpoints.num_free + checkpoints.num_pending + checkpoints.num_kept == 2
        assert checkpoints.num_pending == 0, "no step is at hand"
        pinned = {each.restored_slot for each in self.scheduler._requests.values()} - {None}
        assert checkpoints.num_pinned == len(pinned)


class WindowedSchedulerMachine(SchedulerMachine):
    """The same for a model whose layers all have a window. The runner reads the window alone, and what is before it is
    held by nobody."""

    groups = groups_of([3, 3])

    def held_by(self, request: Request) -> list[int]:
        first = request.num_hidden_blocks
        if request.block_table:
            assert first == min(max(0, request.num_computed_tokens - 2) // 2, len(request.block_table) - 1)
        windowed = [request.block_table, *request.window_tables][self.groups.num_full :]
        assert all({*table[:first]} <= {table[first]} for table in windowed if table)
        full = request.block_table if self.groups.num_full else []
        held = [*full, *chain.from_iterable(table[first:] for table in windowed)]
        assert request.num_blocks == len(held)
        return held


class MixedSchedulerMachine(WindowedSchedulerMachine):
    """The same where only some layers have a window, in two groups beside that of the others."""

    groups = groups_of([3, None, 3])
    num_blocks = 27


TestSchedulerMachine = pytest.mark.fuzz(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(max_examples=num_examples(60), stateful_step_count=40, deadline=None)
TestWindowedSchedulerMachine = pytest.mark.fuzz(WindowedSchedulerMachine.TestCase)
TestWindowedSchedulerMachine.settings = settings(max_examples=num_examples(40), stateful_step_count=40, deadline=None)
TestMixedSchedulerMachine = pytest.mark.fuzz(MixedSchedulerMachine.TestCase)
TestMixedSchedulerMachine.settings = settings(max_examples=num_examples(40), stateful_step_count=40, deadline=None)
TestStatefulSchedulerMachine = pytest.mark.fuzz(StatefulSchedulerMachine.TestCase)
TestStatefulSchedulerMachine.settings = settings(max_examples=num_examples(40), stateful_step_count=40, deadline=None)
TestCheckpointedSchedulerMachine = pytest.mark.fuzz(CheckpointedSchedulerMachine.TestCase)
TestCheckpointedSchedulerMachine.settings = settings(
    max_examples=num_examples(60), stateful_step_count=40, deadline=None
)
