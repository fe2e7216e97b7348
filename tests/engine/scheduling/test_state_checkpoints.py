"""Copies of states are made on a grid of positions, found by their tokens, and overwritten in order of use."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.core.draft import Drafter
from engine.core.request import Request
from engine.engine import Engine
from engine.scheduling.prefix_cache import NullPrefixCache, PrefixCache
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from engine.scheduling.state_checkpoints import StateCheckpoints
from tests.engine.fakes import FakeRunner, add, batches, expected_tokens, fake_info, run_to_end
from tests.engine.requests import queued
from tests.engine.scheduling.speculation.prophets import oracle_drafters

BLOCK_SIZE, INTERVAL = 4, 8


def engine_with_states(
    num_copies: int = 50, new_drafter: Callable[[], Drafter] = PromptLookup, **settings: Any
) -> Engine:
    config = EngineConfig(model="fake", block_size=BLOCK_SIZE, state_checkpoint_interval=INTERVAL, **settings)
    info = fake_info(64, BLOCK_SIZE, num_state_slots=4, num_state_checkpoints=num_copies)
    return assemble(config, info, FakeRunner(BLOCK_SIZE), new_drafter=new_drafter, clock=lambda: 0.0)


def num_cached(engine: Engine, request_id: str, prompt: Sequence[int], max_tokens: int = 1) -> int:
    add(engine, request_id, prompt, max_tokens=max_tokens)
    first = run_to_end(engine)[request_id][0].first
    assert first is not None
    return first.num_cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(8, 0), (9, 8), (15, 8), (16, 8), (17, 16), (30, 24)])
def test_a_prompt_goes_on_from_the_deepest_copy_that_leaves_a_token(length: int, cached: int) -> None:
    engine = engine_with_states()
    assert num_cached(engine, "first", range(30)) == 0
    assert num_cached(engine, "second", range(length)) == cached


def test_a_prompt_that_differs_behind_a_copy_goes_on_from_it() -> None:
    engine = engine_with_states()
    num_cached(engine, "first", range(30))
    assert num_cached(engine, "second", [*range(17), 40, 41]) == 16
    assert num_cached(engine, "third", [*range(15), 40, 41, 42]) == 8
    assert num_cached(engine, "other", [40, *range(29)]) == 0


def test_copies_are_made_while_a_text_is_generated_too() -> None:
    engine = engine_with_states()
    prompt = [*range(5)]
    add(engine, "first", prompt, max_tokens=20)
    text = prompt + [token for update in run_to_end(engine)["first"] for token in update.token_ids]
    assert num_cached(engine, "second", [*text, 1]) == 24


def test_a_conversation_computes_its_new_turn_and_less_than_a_grid_step_more() -> None:
    engine = engine_with_states()
    text = [*range(21)]
    for turn in range(10):
        assert turn == 0 or num_cached(engine, str(turn), text) > len(text) - 3 - 4 - INTERVAL
        add(engine, f"answer {turn}", text, max_tokens=3)
        text += [token for update in run_to_end(engine)[f"answer {turn}"] for token in update.token_ids]
        text += [turn] * 4


def test_chunks_end_on_the_grid() -> None:
    engine = engine_with_states()
    add(engine, "first", range(30), max_tokens=1)
    run_to_end(engine)
    ends = [request.end for batch in batches(engine) for request in batch.requests]
    assert ends == [8, 16, 24, 30]


def test_drafts_end_before_the_grid_and_the_step_that_ends_there_has_none() -> None:
    engine = engine_with_states(num_speculative_tokens=32, new_drafter=oracle_drafters())
    prompt = [*range(5)]
    add(engine, "first", prompt, max_tokens=40)
    run_to_end(engine)
    shares = [request for batch in batches(engine) for request in batch.requests if request.start >= len(prompt)]
    assert sum(request.num_drafts for request in shares) > 20
    assert all(request.end // INTERVAL == request.start // INTERVAL for request in shares if request.num_drafts)
    saved = [request.end for request in shares if request.saved_slot is not None]
    assert saved == [8, 16, 24, 32, 40]
    assert num_cached(engine, "second", [*prompt, *expected_tokens(prompt, 40), 1]) == 40


def test_without_copies_drafts_are_as_long_as_they_pay() -> None:
    engine = engine_with_states(0, num_speculative_tokens=32, new_drafter=oracle_drafters())
    add(engine, "first", range(5), max_tokens=40)
    run_to_end(engine)
    assert max(request.num_drafts for batch in batches(engine) for request in batch.requests) > INTERVAL


def test_without_room_for_copies_or_without_a_cache_nothing_is_copied() -> None:
    for engine in (engine_with_states(0), engine_with_states(enable_prefix_caching=False)):
        num_cached(engine, "first", range(30))
        assert num_cached(engine, "second", range(30)) == 0
        assert all(request.saved_slot is None for batch in batches(engine) for request in batch.requests)
        assert len(batches(engine)) == 2, "prompts are not cut"


def test_requests_of_another_salt_share_no_copy() -> None:
    engine = engine_with_states()
    add(engine, "first", range(30), max_tokens=1, cache_salt="x")
    run_to_end(engine)
    assert num_cached(engine, "second", range(30)) == 0


def test_after_a_reset_no_copy_is_found_and_slots_are_used_again() -> None:
    engine = engine_with_states(3)
    num_cached(engine, "first", range(30))
    engine.reset_prefix_cache(clears_store=False)
    assert num_cached(engine, "second", range(30)) == 0
    assert num_cached(engine, "third", range(30)) == 24


def request_of(first: int) -> Request:
    return queued("r", [first, *range(1, 30)])


def copied(checkpoints: StateCheckpoints, request: Request, end: int = INTERVAL) -> int:
    slot = checkpoints.try_begin(request, end)
    assert slot is not None
    checkpoints.keep(slot)
    return slot


def test_the_least_recently_used_copy_is_overwritten_unless_it_is_pinned() -> None:
    checkpoints = StateCheckpoints(range(5, 7), INTERVAL, BLOCK_SIZE, PrefixCache(BLOCK_SIZE))
    first, second = copied(checkpoints, request_of(1)), copied(checkpoints, request_of(2))
    assert {first, second} == {5, 6}
    checkpoints.pin(first)
    assert copied(checkpoints, request_of(3)) == second
    assert checkpoints.deepest(request_of(2), 7) == (0, None)
    assert checkpoints.deepest(request_of(1), 7)[1] == first
    checkpoints.pin(second)
    assert checkpoints.try_begin(request_of(4), INTERVAL) is None, "all are pinned"
    checkpoints.unpin(first)
    assert copied(checkpoints, request_of(4)) == first


def test_a_copy_is_made_once_on_the_grid_and_found_once_it_is_made() -> None:
    checkpoints = StateCheckpoints(range(3), INTERVAL, BLOCK_SIZE, PrefixCache(BLOCK_SIZE))
    request = request_of(1)
    assert checkpoints.try_begin(request, INTERVAL - 1) is None
    slot = checkpoints.try_begin(request, INTERVAL)
    assert slot is not None and checkpoints.try_begin(request_of(1), INTERVAL) is None, "it is being made"
    assert checkpoints.deepest(request, 7)[0] == 0
    checkpoints.cancel(slot)
    assert (checkpoints.num_free, checkpoints.num_pending, checkpoints.num_kept) == (3, 0, 0)
    copied(checkpoints, request)
    assert checkpoints.try_begin(request, INTERVAL) is None
    assert checkpoints.deepest(request, 7)[0] == 2


def test_where_nothing_is_cached_nothing_is_copied() -> None:
    checkpoints = StateCheckpoints(range(3), INTERVAL, BLOCK_SIZE, NullPrefixCache())
    assert checkpoints.try_begin(request_of(1), INTERVAL) is None
