"""What is computed is stored once; what is stored is read back while others run, or computed where that is faster."""

from typing import Any

import pytest

from engine.core.batch import Direction, Phase
from engine.core.messages import RequestUpdate
from tests.clock import Clock
from tests.engine.fakes import add, expected_tokens, run_to_end, tokens_of
from tests.engine.scheduling.fake_store import Content
from tests.engine.scheduling.tiered_engine import PROMPT, engine_with_store, num_cached, tiers_of


def stored_before(prompt: list[int] = PROMPT, **fields: Any) -> dict[bytes, Content]:
    """Returns what an engine stores of a prompt and one token."""
    engine, store, _ = engine_with_store()
    add(engine, "before", prompt, max_tokens=1, **fields)
    run_to_end(engine)
    return store.stored


def test_each_full_block_is_stored_once() -> None:
    engine, store, _ = engine_with_store()
    for name in ("a", "b"):
        add(engine, name, PROMPT, max_tokens=4)
        run_to_end(engine)
    assert len(store.stored) == 4
    assert all(
        content[-1] == (*PROMPT, *expected_tokens(PROMPT, 4))[: len(content[-1])] for content in store.stored.values()
    )


def test_another_engine_finds_them() -> None:
    engine, _, runner = engine_with_store(stored_before())
    add(engine, "a", PROMPT)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens(PROMPT, 5) and num_cached(updates) == 12
    assert runner.batches[0].num_tokens == 1 and engine._scheduler.stats.prefix_disk_hits == 12
    assert engine._scheduler.stats.pool.held == 0


def test_what_is_in_memory_is_not_read() -> None:
    stored = stored_before([*PROMPT[:8], 40, 41, 42, 43, 44])
    engine, store, _ = engine_with_store(stored | stored_before())
    add(engine, "a", PROMPT, max_tokens=1)
    run_to_end(engine)
    store.is_held_up = True
    add(engine, "b", [*PROMPT[:8], 40, 41, 42, 43, 44])
    engine.step()
    assert [each.direction for each in store.under_way] == [Direction.LOAD]
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["b"]) == 12
    assert engine._scheduler.stats.prefix_disk_hits == 12 + 4


def test_other_salts_find_nothing() -> None:
    engine, _, _ = engine_with_store(stored_before(cache_salt="alice"))
    add(engine, "a", PROMPT, cache_salt="bob")
    assert num_cached(run_to_end(engine)["a"]) == 0


def test_others_go_on_and_others_start_while_a_request_waits_for_its_blocks() -> None:
    engine, store, _ = engine_with_store(stored_before())
    store.is_held_up = True
    add(engine, "running", [40, 41])
    engine.step()
    add(engine, "waiting", PROMPT)
    add(engine, "new", [45, 46])
    names = {update.request_id for _ in range(4) for update in engine.step().updates}
    assert names == {"running", "new"} and engine._scheduler.stats.num_waiting == 1
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["waiting"]) == 12


def test_two_requests_wait_for_one_read() -> None:
    engine, store, _ = engine_with_store(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    add(engine, "b", PROMPT)
    engine.step()
    assert len(store.under_way) == 3 and engine._scheduler.stats.num_waiting == 2
    store.is_held_up = False
    assert all(num_cached(updates) == 12 for updates in run_to_end(engine).values())


def test_a_request_that_waited_for_anothers_read_then_reads_its_own_rest() -> None:
    longer = [*PROMPT[:12], *range(20, 29)]
    engine, _, runner = engine_with_store(stored_before() | stored_before(longer))
    add(engine, "a", PROMPT)
    add(engine, "b", longer)
    assert num_cached(run_to_end(engine)["b"]) == 20
    assert sum(batch.num_tokens for batch in runner.batches if batch.phase is Phase.PREFILL) == 2


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_damaged_file_is_a_shorter_match(broken: int) -> None:
    engine, store, _ = engine_with_store(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    store.end(broken, succeeded=False)
    store.is_held_up = False
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens(PROMPT, 5) and num_cached(updates) == 4 * broken
    assert len(store.stored) == 4, "the damaged block is stored again"


@pytest.mark.parametrize("num_ended", [0, 1, 3])
def test_an_abort_while_blocks_are_read_leaves_nothing_behind(num_ended: int) -> None:
    engine, store, _ = engine_with_store(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    for _ in range(num_ended):
        store.end()
    engine.abort_requests(["a"])
    engine.step()
    assert engine._scheduler.stats.num_waiting == 0
    store.is_held_up = False
    assert run_to_end(engine) == {} and engine._scheduler.stats.pool.held == 0
    add(engine, "b", PROMPT)
    assert num_cached(run_to_end(engine)["b"]) == 12


def test_a_request_does_not_wait_for_a_disk_that_hangs() -> None:
    clock = Clock()
    engine, store, _ = engine_with_store(stored_before(), clock=clock)
    store.is_held_up = True
    add(engine, "a", PROMPT, max_tokens=1)
    engine.step()
    clock.now_s += 11.0
    updates = list(engine.step().updates)
    assert tokens_of(updates) == expected_tokens(PROMPT, 1) and num_cached(updates) == 0
    assert engine._scheduler.stats.pool.held == 3  # for the disk still writes there
    store.is_held_up = False
    run_to_end(engine)
    assert engine._scheduler.stats.pool.held == 0


def test_what_is_computed_faster_is_computed() -> None:
    engine, _, _ = engine_with_store(stored_before())
    tiers_of(engine)._read_s = 1.0
    add(engine, "first", [40, 41, 42], max_tokens=1)  # a step takes no time by this clock
    run_to_end(engine)
    add(engine, "a", PROMPT)
    assert num_cached(run_to_end(engine)["a"]) == 0
    assert engine._scheduler.stats.prefix_disk_declined == 12
    assert tiers_of(engine)._read_s < 1.0, "so that a disk that was slow once is tried again"


def test_what_was_read_too_often_in_vain_is_computed() -> None:
    engine, store, _ = engine_with_store(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    for _ in range(3):
        engine.step()
        engine.reset_prefix_cache(clears_store=False)
        while store.under_way:
            store.end()
    assert engine._scheduler.stats.prefix_disk_declined == 0
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["a"]) == 0
    assert engine._scheduler.stats.prefix_disk_declined == 12


def test_a_preempted_request_reads_what_it_had() -> None:
    engine, store, runner = engine_with_store(num_blocks=8)
    add(engine, "old", [40, 41, 42, 43, 44], max_tokens=22, priority=-1)
    add(engine, "new", PROMPT, max_tokens=14)
    updates: dict[str, list[RequestUpdate]] = {"old": [], "new": []}
    while engine.has_work:
        for update in engine.step().updates:
            updates[update.request_id].append(update)
        while store.under_way:
            store.end()
    assert updates["new"][-1].num_preemptions > 0
    assert tokens_of(updates["new"]) == expected_tokens(PROMPT, 14)
    num_prefilled = sum(batch.num_tokens for batch in runner.batches if batch.phase is Phase.PREFILL)
    assert num_prefilled < 5 + 2 * len(PROMPT)
    assert engine._scheduler.stats.pool.held == 0


def test_few_blocks_are_held_for_being_stored() -> None:
    engine, store, _ = engine_with_store(num_blocks=16)
    store.is_held_up = True
    add(engine, "a", list(range(1, 42)), max_tokens=1)
    for _ in range(3):
        engine.step()
    assert len(store.under_way) == 2 == engine._scheduler.stats.pool.held
    store.is_held_up = False
    run_to_end(engine)
    assert len(store.stored) == 10 and engine._scheduler.stats.pool.held == 0


def test_a_block_that_is_taken_before_it_is_stored_is_not() -> None:
    engine, store, _ = engine_with_store(num_blocks=11)
    store.is_held_up = True
    add(engine, "a", list(range(1, 42)), max_tokens=1)
    engine.step()
    add(engine, "b", [*range(1, 31)][::-1], max_tokens=1)
    while engine.step().stats.num_running:
        pass
    store.is_held_up = False
    run_to_end(engine)
    assert len(store.stored) < 10 + 7 and engine._scheduler.stats.pool.held == 0


@pytest.mark.parametrize("clears_store", [False, True])
def test_a_reset_forgets_memory_and_if_asked_to_the_store(clears_store: bool) -> None:
    engine, _, _ = engine_with_store()
    add(engine, "a", PROMPT, max_tokens=1)
    run_to_end(engine)
    engine.reset_prefix_cache(clears_store)
    assert engine._scheduler.stats.pool.cached == 0
    add(engine, "b", PROMPT)
    assert num_cached(run_to_end(engine)["b"]) == (0 if clears_store else 12)


def test_what_made_room_before_its_request_ran_is_read_again() -> None:
    engine, store, _ = engine_with_store(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    for _ in range(3):
        store.end()
    engine._scheduler.kv.end_transfers(store.take_ended())
    engine._scheduler.kv.reset()
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["a"]) == 12


def test_a_reset_forgets_what_is_being_read() -> None:
    engine, store, _ = engine_with_store(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    engine.reset_prefix_cache(clears_store=False)
    for _ in range(3):
        store.end()
    store.stored.clear()
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["a"]) == 0
    assert engine._scheduler.stats.pool.held == 0
