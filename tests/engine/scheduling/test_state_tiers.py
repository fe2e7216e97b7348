"""Copies of states are stored beside blocks; a prefix is read as far as both are there, and the rest is computed."""

from typing import Any

import pytest

from engine.core.batch import BlockTransfer, Direction, StateTransfer
from engine.core.cache_steering import CacheSteering
from engine.core.messages import FindPrefix, RequestUpdate
from engine.engine import Engine
from engine.scheduling.state_tiers import TieredCheckpoints
from tests.engine.fakes import FakeRunner, add, expected_tokens, run_to_end, tokens_of
from tests.engine.scheduling.fake_store import Content, FakeStore
from tests.engine.scheduling.tiered_engine import engine_with_store, num_cached, tiers_of

PROMPT = list(range(1, 31))
"""Seven full blocks of four tokens, with states after 8, 16 and 24 of them, and two tokens."""


def engine_with_states(
    stored: dict[bytes, Content] | None = None, num_copies: int = 20, **settings: Any
) -> tuple[Engine, FakeStore, FakeRunner]:
    return engine_with_store(stored, num_state_checkpoints=num_copies, state_checkpoint_interval=8, **settings)


def stored_before(prompt: list[int] = PROMPT) -> dict[bytes, Content]:
    """Returns what an engine stores of a prompt and one token."""
    engine, store, _ = engine_with_states()
    add(engine, "before", prompt, max_tokens=1)
    run_to_end(engine)
    return store.stored


def states_in(stored: dict[bytes, Content]) -> dict[int, bytes]:
    """Returns the names of stored states by the number of tokens that they have seen."""
    return {len(content[0]): name for name, content in stored.items() if len(content) == 1}


def block_in(stored: dict[bytes, Content], end: int) -> bytes:
    """Returns the name of the stored block that ends there."""
    return next(name for name, content in stored.items() if len(content) == 4 and len(content[-1]) == end)


def states_of(engine: Engine) -> TieredCheckpoints:
    states = tiers_of(engine)._states
    assert isinstance(states, TieredCheckpoints)
    return states


def ask(engine: Engine, name: str = "a", num_found: int | None = None) -> list[RequestUpdate]:
    """Runs the prompt, which must be answered rightly, and go on from `num_found` of its tokens."""
    add(engine, name, PROMPT)
    updates = run_to_end(engine)[name]
    assert tokens_of(updates) == expected_tokens(PROMPT, 5)
    assert num_found is None or num_cached(updates) == num_found
    assert engine._scheduler.stats.pool.held == states_of(engine).num_pinned == states_of(engine).num_pending == 0
    return updates


def test_states_are_stored_once_at_each_point_of_the_grid() -> None:
    engine, store, _ = engine_with_states()
    for name in ("a", "b"):
        ask(engine, name)
    assert sorted(states_in(store.stored)) == [8, 16, 24, 32]
    assert all(
        store.stored[name] == [(*PROMPT, *expected_tokens(PROMPT, 2))[:end]]
        for end, name in states_in(store.stored).items()
    )


def test_another_engine_goes_on_from_the_deepest_states_and_says_so() -> None:
    engine, _, runner = engine_with_states(stored_before())
    ask(engine, num_found=24)
    assert runner.batches[0].num_tokens == 6 and engine._scheduler.stats.prefix_disk_hits == 24


@pytest.mark.parametrize(("lost", "num_found"), [((), 24), ((24,), 16), ((24, 8), 16), ((16, 24), 8), ((8, 16, 24), 0)])
def test_blocks_without_states_are_a_miss_to_the_next_shallower_point(lost: tuple[int, ...], num_found: int) -> None:
    stored = stored_before()
    for end in lost:
        del stored[states_in(stored)[end]]
    engine, _, _ = engine_with_states(stored)
    ask(engine, num_found=num_found)
    assert engine._scheduler.stats.prefix_disk_hits == num_found


@pytest.mark.parametrize(("lost", "num_found"), [(28, 24), (24, 16), (12, 8), (4, 0)])
def test_states_without_all_blocks_are_a_miss_to_the_next_shallower_point(lost: int, num_found: int) -> None:
    stored = stored_before()
    del stored[block_in(stored, lost)]
    engine, _, _ = engine_with_states(stored)
    ask(engine, num_found=num_found)


def test_no_more_is_read_than_leads_to_the_deepest_states() -> None:
    stored = stored_before()
    del stored[states_in(stored)[24]]
    engine, store, _ = engine_with_states(stored)
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    assert [isinstance(each, StateTransfer) for each in store.under_way] == [False] * 4 + [True]


@pytest.mark.parametrize("broken", range(7))
def test_a_damaged_file_is_a_shorter_match(broken: int) -> None:
    engine, store, _ = engine_with_states(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    assert len(store.under_way) == 7
    store.end(broken, succeeded=False)
    store.is_held_up = False
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens(PROMPT, 5)
    assert num_cached(updates) == (16 if broken == 6 else broken // 2 * 8)
    assert engine._scheduler.stats.prefix_disk_hits == num_cached(updates)
    assert sorted(states_in(store.stored)) == [8, 16, 24, 32], "what was damaged is stored again"


def test_states_are_read_alone_where_only_they_made_room() -> None:
    engine, store, _ = engine_with_states(num_copies=3)
    ask(engine)
    add(engine, "other", range(40, 10, -1), max_tokens=1)
    run_to_end(engine)
    store.is_held_up = True
    add(engine, "b", PROMPT)
    engine.step()
    assert [type(each) for each in store.under_way if each.direction is Direction.LOAD] == [StateTransfer]
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["b"]) == 24 and engine._scheduler.stats.prefix_disk_hits == 24


def test_blocks_are_read_alone_where_the_states_are_in_memory() -> None:
    engine, store, _ = engine_with_states()
    ask(engine)
    tiers_of(engine)._pool.clear_cache()
    store.is_held_up = True
    add(engine, "b", PROMPT)
    engine.step()
    assert [type(each) for each in store.under_way] == [BlockTransfer] * 6
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["b"]) == 24


def test_two_requests_wait_for_one_read_of_states() -> None:
    engine, store, _ = engine_with_states(stored_before())
    store.is_held_up = True
    for name in ("a", "b"):
        add(engine, name, PROMPT)
    engine.step()
    for _ in range(6):
        store.end()
    add(engine, "c", PROMPT)
    engine.step()
    assert len(store.under_way) == 1 and engine._scheduler.stats.num_waiting == 3
    store.is_held_up = False
    assert all(num_cached(updates) == 24 for updates in run_to_end(engine).values())


@pytest.mark.parametrize("num_ended", [0, 6, 7])
def test_an_abort_while_states_are_read_leaves_nothing_behind(num_ended: int) -> None:
    engine, store, _ = engine_with_states(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    for _ in range(num_ended):
        store.end()
    engine.abort_requests(["a"])
    engine.step()
    store.is_held_up = False
    assert run_to_end(engine) == {} and engine._scheduler.stats.pool.held == states_of(engine).num_pending == 0
    ask(engine, "b", num_found=24)


def test_a_reset_forgets_states_that_are_being_read() -> None:
    engine, store, _ = engine_with_states(stored_before())
    store.is_held_up = True
    add(engine, "a", PROMPT)
    engine.step()
    engine.reset_prefix_cache(clears_store=False)
    while store.under_way:
        store.end()
    store.stored.clear()
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["a"]) == 0 and states_of(engine).num_pending == 0


def test_a_reset_forgets_states_that_wait_to_be_stored() -> None:
    engine, store, _ = engine_with_states(num_copies=8)
    store.is_held_up = True
    add(engine, "a", PROMPT, max_tokens=1)
    for _ in range(10):
        engine.step()
    engine.reset_prefix_cache(clears_store=True)
    store.is_held_up = False
    run_to_end(engine)
    assert [*states_in(store.stored)] == [8], "it was being stored"


def test_without_a_slot_to_read_into_the_rest_is_computed() -> None:
    engine, store, _ = engine_with_states(stored_before(), num_copies=1)
    add(engine, "other", range(40, 28, -1), max_tokens=1)
    store.is_held_up = True
    engine.step()
    engine.step()
    assert [type(each) for each in store.under_way].count(StateTransfer) == 1, "it pins the only slot"
    add(engine, "a", PROMPT)
    updates = [update for _ in range(20) for update in engine.step().updates if update.request_id == "a"]
    assert tokens_of(updates) == expected_tokens(PROMPT, 5) and num_cached(updates) == 0
    assert engine._scheduler.stats.prefix_disk_declined == 24


def test_few_slots_are_pinned_for_being_stored_and_what_is_overwritten_before_is_not_stored() -> None:
    engine, store, _ = engine_with_states(num_copies=2)
    store.is_held_up = True
    add(engine, "a", PROMPT, max_tokens=1)
    for _ in range(10):
        engine.step()
    assert [type(each) for each in store.under_way].count(StateTransfer) == 1 == states_of(engine).num_pinned
    store.is_held_up = False
    run_to_end(engine)
    assert sorted(states_in(store.stored)) == [8, 24]


def test_what_is_computed_faster_is_computed() -> None:
    engine, _, _ = engine_with_states(stored_before())
    add(engine, "first", [40, 41, 42], max_tokens=1)  # a step takes no time by this clock
    run_to_end(engine)
    tiers_of(engine)._read_states_s = 1.0
    ask(engine, num_found=0)
    assert engine._scheduler.stats.prefix_disk_declined == 24
    assert tiers_of(engine)._read_states_s < 1.0, "so that a disk that was slow once is tried again"


def test_what_stays_in_memory_is_not_stored() -> None:
    engine, store, _ = engine_with_states()
    add(engine, "a", PROMPT, steering=CacheSteering(stays_in_memory=True))
    run_to_end(engine)
    assert store.stored == {}
    ask(engine, "b", num_found=24)


def test_dropped_prefixes_leave_no_states() -> None:
    engine, store, _ = engine_with_states()
    add(engine, "a", PROMPT, steering=CacheSteering(key="mine"))
    run_to_end(engine)
    assert states_in(store.stored)
    engine.drop_prefixes("", "mine")
    assert store.stored == {} and not states_of(engine)._slot_of


def end_blocks(store: FakeStore) -> None:
    """Ends the transfers of blocks under way, and none of states."""
    for index in reversed(range(len(store.under_way))):
        if isinstance(store.under_way[index], BlockTransfer):
            store.end(index)


def hand_over(engine: Engine, name: str) -> int:
    """Computes the prompt for another engine, and returns how many of its tokens that finds."""
    add(engine, name, PROMPT, max_tokens=0, until_stored=True)
    [update] = run_to_end(engine)[name]
    return update.num_stored_tokens


def test_a_prompt_is_handed_over_with_its_states() -> None:
    engine, store, _ = engine_with_states()
    store.is_held_up = True
    add(engine, "a", PROMPT, max_tokens=0, until_stored=True)
    for _ in range(20):
        assert not engine.step().updates
        end_blocks(store)
    assert len(store.stored) == 7 and not states_in(store.stored)
    store.is_held_up = False
    [update] = run_to_end(engine)["a"]
    assert update.num_stored_tokens == 24
    other, _, _ = engine_with_states(store.stored)
    add(other, "first", [40, 41, 42], max_tokens=1)
    run_to_end(other)
    tiers_of(other)._read_s = 1.0
    add(other, "b", PROMPT, num_announced_tokens=24)
    assert num_cached(run_to_end(other)["b"]) == 24, "it is read whatever it takes"


def test_a_request_waits_for_its_states_that_are_being_stored_and_for_those_that_are_to_be() -> None:
    engine, store, _ = engine_with_states(num_copies=8)
    store.is_held_up = True
    add(engine, "first", range(40, 31, -1), max_tokens=0, until_stored=True)
    add(engine, "a", PROMPT[:9], max_tokens=0, until_stored=True)
    for _ in range(20):
        assert not engine.step().updates
        end_blocks(store)
    assert [type(each) for each in store.under_way] == [StateTransfer], "that of the first one"
    store.is_held_up = False
    assert [updates[0].num_stored_tokens for updates in run_to_end(engine).values()] == [8, 8]


def test_what_is_stored_is_not_stored_again() -> None:
    engine, store, _ = engine_with_states()
    hand_over(engine, "a")
    store.is_held_up = True
    add(engine, "b", PROMPT, max_tokens=0, until_stored=True)
    assert [update.num_stored_tokens for update in engine.step().updates] == [24] and not store.under_way


def test_a_step_that_fails_leaves_no_states_to_be_stored() -> None:
    engine, store, runner = engine_with_states()
    runner.prefill = lambda batch: 1 / 0  # type: ignore[method-assign]
    add(engine, "a", PROMPT)
    run_to_end(engine)
    assert not states_of(engine)._made and states_of(engine).num_free == 20 and not store.stored


def test_announced_states_need_not_be_known_before() -> None:
    stored = stored_before()
    engine, store, _ = engine_with_states(stored)
    known: set[bytes] = set()
    store.num_stored = lambda names: [*(name in known for name in names), False].index(False)  # type: ignore[method-assign]
    store.announce = known.update  # type: ignore[method-assign]
    add(engine, "a", PROMPT, num_announced_tokens=16)
    assert num_cached(run_to_end(engine)["a"]) == 16


def test_states_in_memory_alone_are_stored_when_they_are_asked_for() -> None:
    engine, store, _ = engine_with_states()
    assert hand_over(engine, "a") == 24
    store.stored.clear()  # another server made room
    assert hand_over(engine, "b") == 24 and [*states_in(store.stored)] == [24]


def test_what_is_there_of_a_prefix_is_told() -> None:
    stored = stored_before()
    engine, _, _ = engine_with_states(stored)

    def found() -> tuple[int, int]:
        answer = engine.find_prefix(FindPrefix(7, PROMPT, "", ""))
        return answer.num_cached_tokens, answer.num_stored_tokens

    assert found() == (24, 24)
    ask(engine)
    del stored[states_in(stored)[24]]
    assert found() == (24, 16)
