"""Engines that are killed at any write follow one another over the same blocks, and no answer shows it."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.core.messages import RequestUpdate
from engine.engine import Engine
from engine.kv_store.block_records import SharedBlockRecords, num_record_bytes
from tests.engine.fakes import FakeRunner, add, expected_tokens, fake_info, run_to_end, tokens_of
from tests.engine.scheduling.fake_store import Content, FakeStore
from tests.fuzz import num_examples

NUM_BLOCKS = 12
DIGEST = bytes(32)


class KilledError(BaseException):
    pass


class MortalKV(dict[Any, Any]):
    """The KV of all engines; a process is killed at one of its writes."""

    num_left: int | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.num_left == 0:
            raise KilledError
        self.num_left = None if self.num_left is None else self.num_left - 1
        super().__setitem__(key, value)


class MortalRunner(FakeRunner):
    def __init__(self, kv: MortalKV) -> None:
        super().__init__(2)
        self.kv = kv


def start(memory: bytearray, kv: MortalKV, stored: dict[bytes, Content] | None) -> Engine:
    runner = MortalRunner(kv)
    config = EngineConfig(model="fake", block_size=2, max_num_seqs=3, max_num_batched_tokens=7)
    records = SharedBlockRecords(memory, NUM_BLOCKS, DIGEST)
    store = None if stored is None else FakeStore(runner, stored)
    return assemble(config, fake_info(NUM_BLOCKS, 2), runner, clock=lambda: 0.0, records=records, store=store)


class BlockRecordsMachine(RuleBasedStateMachine):
    """The runner checks that a step reads a request's own KV alone."""

    stored: dict[bytes, Content] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.kv = bytearray(num_record_bytes(NUM_BLOCKS)), MortalKV()
        self.requests: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.alive: list[str] = []
        self.stored = None if self.stored is None else {}
        self.engine = start(self.memory, self.kv, self.stored)

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=11), max_tokens=st.integers(1, 8))
    def arrive(self, prompt: list[int], max_tokens: int) -> None:
        name = str(len(self.requests))
        self.requests[name], self.outputs[name] = {"prompt": prompt, "max_tokens": max_tokens}, []
        add(self.engine, name, **self.requests[name])
        self.alive.append(name)

    @rule()
    def step(self) -> None:
        if self.engine.has_work:
            self._account(self.engine.step().updates)

    @rule(num_writes=st.integers(0, 12))
    def kill(self, num_writes: int) -> None:
        """Kills the engine at one of its next writes, or at rest, and gives the next one what has not ended."""
        self.kv.num_left = num_writes
        try:
            while self.engine.has_work:
                self._account(self.engine.step().updates)
        except KilledError:
            pass
        self.kv.num_left = None
        self.engine = start(self.memory, self.kv, self.stored)
        for name in self.alive:
            add(self.engine, name, **self.requests[name], output_token_ids=self.outputs[name])

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        self.engine.abort_requests([self.alive.pop(index % len(self.alive))])

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache(clears_store=False)

    def _account(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.outputs[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.alive.remove(update.request_id)

    @invariant()
    def answers_are_those_of_one_engine(self) -> None:
        for name, output in self.outputs.items():
            assert output == expected_tokens(self.requests[name]["prompt"], len(output))

    @invariant()
    def what_is_recorded_is_what_the_cache_holds(self) -> None:
        recorded = dict(SharedBlockRecords(self.memory, NUM_BLOCKS, DIGEST).found)
        assert recorded == self.engine._scheduler._kv._cache._hash_of_block

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        stats = self.engine._scheduler.kv.stats
        assert stats.free + stats.held + stats.cached == NUM_BLOCKS
        assert len(self.engine._scheduler._kv._cache._hash_of_block) >= stats.cached

    def teardown(self) -> None:
        self._account([update for updates in run_to_end(self.engine).values() for update in updates])
        assert not self.alive
        assert self.engine._scheduler.stats.pool.held == 0


class TieredBlockRecordsMachine(BlockRecordsMachine):
    """The same with a KV store beside memory."""

    stored: dict[bytes, Content] | None = {}  # noqa: RUF012 - each machine has its own


TestBlockRecords = pytest.mark.fuzz(BlockRecordsMachine.TestCase)
TestBlockRecords.settings = settings(max_examples=num_examples(32), stateful_step_count=40, deadline=None)
TestTieredBlockRecords = pytest.mark.fuzz(TieredBlockRecordsMachine.TestCase)
TestTieredBlockRecords.settings = settings(max_examples=num_examples(24), stateful_step_count=40, deadline=None)

PROMPT = [1 + number % 7 for number in range(30)]


def test_a_killed_engines_successor_computes_unfinished_blocks_only() -> None:
    memory, kv = bytearray(num_record_bytes(20)), MortalKV()

    def engine() -> tuple[Engine, FakeRunner]:
        runner = MortalRunner(kv)
        records = SharedBlockRecords(memory, 20, DIGEST)
        config = EngineConfig(model="fake", block_size=2, max_num_batched_tokens=7, num_speculative_tokens=0)
        return assemble(config, fake_info(20, 2), runner, records=records), runner

    first, _ = engine()
    add(first, "a", PROMPT, max_tokens=5)
    for _ in range(3):
        first.step()
    kv.num_left = 5
    try:
        first.step()
    except KilledError:
        kv.num_left = None
    second, runner = engine()
    assert second._scheduler.kv.stats.cached == 10
    add(second, "a", PROMPT, max_tokens=5)
    updates = run_to_end(second)["a"]
    assert sum(batch.num_tokens for batch in runner.batches) == 30 - 20 + 4
    assert tokens_of(updates) == expected_tokens(PROMPT, 5)


def test_blocks_that_were_not_stored_before_a_kill_are_stored_when_they_are_used_again() -> None:
    memory, kv, stored = bytearray(num_record_bytes(NUM_BLOCKS)), MortalKV(), dict[bytes, Content]()
    first = start(memory, kv, {})
    add(first, "a", PROMPT[:9], max_tokens=1)
    run_to_end(first)
    second = start(memory, kv, stored)
    for _ in range(2):
        add(second, "a", PROMPT[:9], max_tokens=1)
        assert run_to_end(second)["a"][0].first.num_cached_tokens == 8  # type: ignore[union-attr]
        assert len(stored) == 4


def test_blocks_of_the_dead_that_were_used_longest_ago_make_room_first() -> None:
    memory, kv = bytearray(num_record_bytes(NUM_BLOCKS)), MortalKV()
    first = start(memory, kv, None)
    for name, prompt in (("old", [1] * 9), ("new", [2] * 9), ("old again", [1] * 9)):
        add(first, name, prompt, max_tokens=1)
        run_to_end(first)
    second = start(memory, kv, None)
    add(second, "other", [3] * 15, max_tokens=1)
    run_to_end(second)
    add(second, "old", [1] * 9, max_tokens=1)
    assert run_to_end(second)["old"][0].first.num_cached_tokens == 8  # type: ignore[union-attr]
    add(second, "new", [2] * 9, max_tokens=1)
    assert run_to_end(second)["new"][0].first.num_cached_tokens < 8  # type: ignore[union-attr]
