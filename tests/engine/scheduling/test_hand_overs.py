"""What one engine computes for another is told when it is stored, and read by the other whatever that takes."""

from typing import Any

import pytest

from engine.core.messages import FindPrefix, PrefixFound, RequestUpdate
from engine.core.request import FinishReason
from engine.engine import Engine
from tests.engine.fakes import add, expected_tokens, fake_engine, run_to_end, tokens_of
from tests.engine.scheduling.fake_store import Content
from tests.engine.scheduling.tiered_engine import PROMPT, engine_with_store, num_cached, tiers_of


def hand_over(engine: Engine, name: str = "a", prompt: list[int] = PROMPT, **fields: Any) -> None:
    add(engine, name, prompt, max_tokens=0, until_stored=True, **fields)


def handed_over(prompt: list[int] = PROMPT) -> dict[bytes, Content]:
    """Returns what an engine stores of a prompt for another one."""
    engine, store, _ = engine_with_store()
    hand_over(engine, prompt=prompt)
    run_to_end(engine)
    return store.stored


def only(updates: list[RequestUpdate]) -> RequestUpdate:
    [update] = updates
    return update


def test_a_request_ends_when_all_its_full_blocks_are_stored() -> None:
    engine, store, _ = engine_with_store()
    store.is_held_up = True
    hand_over(engine)
    updates: list[RequestUpdate] = []
    while len(store.stored) < 3:
        for _ in range(4):
            updates += engine.step().updates
        assert updates == [] and engine.has_work
        store.end()
    update = only(run_to_end(engine)["a"])
    assert (update.finish_reason, update.num_stored_tokens, update.token_ids) == (FinishReason.LENGTH, 12, ())
    assert engine._scheduler.stats.pool.held == 0


def test_what_is_stored_already_is_told_at_once() -> None:
    engine, store, _ = engine_with_store()
    hand_over(engine)
    run_to_end(engine)
    store.is_held_up = True
    hand_over(engine, "b")
    assert only(list(engine.step().updates)).num_stored_tokens == 12


@pytest.mark.parametrize(("broken", "num_stored"), [(0, 0), (1, 4), (2, 8)])
def test_what_cannot_be_stored_is_not_waited_for(broken: int, num_stored: int) -> None:
    engine, store, _ = engine_with_store()
    store.is_held_up = True
    hand_over(engine)
    while not store.under_way:
        engine.step()
    store.end(broken, succeeded=False)
    store.is_held_up = False
    assert only(run_to_end(engine)["a"]).num_stored_tokens == num_stored


def test_what_is_being_stored_for_another_is_not_stored_twice() -> None:
    engine, store, _ = engine_with_store()
    store.is_held_up = True
    hand_over(engine)
    while len(store.under_way) < 3:
        engine.step()
    hand_over(engine, "b")
    for _ in range(8):
        assert list(engine.step().updates) == [] and len(store.under_way) == 3
    store.is_held_up = False
    assert [only(updates).num_stored_tokens for updates in run_to_end(engine).values()] == [12, 12]


def test_without_a_store_nothing_is_waited_for() -> None:
    engine = fake_engine()
    hand_over(engine)
    assert only(run_to_end(engine)["a"]).num_stored_tokens == 0


def test_what_is_in_memory_alone_is_stored_when_it_is_asked_for() -> None:
    engine, store, _ = engine_with_store()
    hand_over(engine)
    run_to_end(engine)
    store.stored.clear()  # another server made room
    hand_over(engine, "b")
    assert only(run_to_end(engine)["b"]).num_stored_tokens == 12 and len(store.stored) == 3


@pytest.mark.parametrize("num_ended", range(4))
def test_an_abort_while_blocks_are_stored_leaves_nothing_behind(num_ended: int) -> None:
    engine, store, _ = engine_with_store()
    store.is_held_up = True
    hand_over(engine)
    while len(store.under_way) < 3:
        engine.step()
    for _ in range(num_ended):
        store.end()
    engine.abort_requests(["a"])
    store.is_held_up = False
    assert run_to_end(engine) == {} and not engine._hand_overs._requests
    assert engine._scheduler.stats.pool.held == 0


def test_a_request_that_fails_is_told_at_once() -> None:
    engine, _, runner = engine_with_store()
    runner.prefill = lambda batch: 1 / 0  # type: ignore[method-assign]
    hand_over(engine)
    assert only(run_to_end(engine)["a"]).finish_reason is FinishReason.ERROR


def test_announced_blocks_are_read_even_if_computing_them_seems_faster() -> None:
    for num_announced, num_found in ((12, 12), (8, 12), (0, 0)):
        engine, _, _ = engine_with_store(handed_over())
        add(engine, "first", [40, 41, 42], max_tokens=1)  # a step takes no time by this clock
        run_to_end(engine)
        tiers_of(engine)._read_s = 1.0
        add(engine, "a", PROMPT, num_announced_tokens=num_announced)
        updates = run_to_end(engine)["a"]
        assert tokens_of(updates) == expected_tokens(PROMPT, 5) and num_cached(updates) == num_found


def test_announced_blocks_need_not_be_known_before() -> None:
    stored = handed_over()
    engine, store, _ = engine_with_store(stored)
    known: set[bytes] = set()
    store.num_stored = lambda hashes: [*(h in known for h in hashes), False].index(False)  # type: ignore[method-assign]
    store.announce = known.update  # type: ignore[method-assign]
    add(engine, "unknown", PROMPT[:-1], max_tokens=1)
    assert num_cached(run_to_end(engine)["unknown"]) == 0
    engine.reset_prefix_cache(clears_store=False)
    add(engine, "a", PROMPT, num_announced_tokens=8)
    assert num_cached(run_to_end(engine)["a"]) == 8 and len(known) >= 2


def test_what_was_announced_and_is_not_there_is_computed() -> None:
    engine, store, _ = engine_with_store()
    add(engine, "a", PROMPT, num_announced_tokens=12)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens(PROMPT, 5) and num_cached(updates) == 0
    assert len(store.stored) == 4 and engine._scheduler.stats.pool.held == 0


def test_what_is_there_of_a_prefix_is_told() -> None:
    def found(*prompt: int, salt: str = "") -> tuple[int, int]:
        answer = engine.find_prefix(FindPrefix(7, list(prompt), salt, ""))
        assert answer == PrefixFound(7, answer.num_cached_tokens, answer.num_stored_tokens)
        return answer.num_cached_tokens, answer.num_stored_tokens

    engine, store, _ = engine_with_store(handed_over())
    assert found(*PROMPT) == (12, 12) and found(*PROMPT[:12]) == (8, 8), "one token at least is computed"
    assert found(*PROMPT, salt="x") == found(*PROMPT[::-1]) == (0, 0)
    add(engine, "a", PROMPT, max_tokens=4)
    run_to_end(engine)
    longer = [*PROMPT, *expected_tokens(PROMPT, 4)]
    assert found(*longer) == (16, 16)
    store.stored.clear()
    assert found(*longer) == (16, 0)
    engine.reset_prefix_cache(clears_store=False)
    assert found(*longer) == (0, 0) and not engine.has_work
