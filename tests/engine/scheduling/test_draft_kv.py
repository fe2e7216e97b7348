"""KV of a draft model's own: computed where steps need it, and never read where it was not."""

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import Batch, Phase
from engine.core.request import Request
from engine.engine import Engine
from engine.scheduling.draft_kv import MAX_BEHIND, OwnDraftKV
from tests.engine.fakes import add, batches, expected_tokens, run_to_end, tokens_of
from tests.engine.requests import queued
from tests.engine.scheduling.speculation.timed import TimedRunner, drafting_engine


def with_own_kv(
    block_size: int = 4, errs: Callable[[], bool] = lambda: False, num_blocks: int = 64, **settings: Any
) -> Engine:
    """Returns an engine whose runner checks that the draft model reads no KV but that of the request's own tokens."""
    return drafting_engine(TimedRunner(block_size, errs), num_blocks, draft_kv_bytes=1, **settings)


def drafted(engine: Engine) -> list[Batch]:
    return [batch for batch in batches(engine) if batch.phase is Phase.DECODE and batch.num_drafts]


@given(
    pattern=st.lists(st.booleans(), min_size=1, max_size=7),
    block_size=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    has_head=st.booleans(),
)
def test_requests_get_their_tokens_and_drafts_come_from_their_own_kv(
    pattern: list[bool], block_size: int, seed: int, has_head: bool
) -> None:
    """Prefixes are shared, requests preempted and aborted, drafts rejected, and steps without drafts between others."""
    turns, rng = count(), random.Random(seed)
    engine = with_own_kv(
        block_size,
        lambda: pattern[next(turns) % len(pattern)],
        num_blocks=-(-60 // block_size),
        has_head=has_head,
        max_prefill_tokens_per_gap=4,
    )
    prompts = {str(index): [1 + rng.randrange(2) for _ in range(1 + 2 * index)] for index in range(6)}
    answers: dict[str, list[int]] = {name: [] for name in prompts}

    def step() -> None:
        for update in engine.step().updates:
            answers.setdefault(update.request_id, []).extend(update.token_ids)

    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=12)
        add(engine, f"other {name}", prompt, max_tokens=20, seed=1)
        for _ in range(rng.randrange(6)):
            step()
        engine.abort_requests([f"other {name}"])
    while engine.has_work:
        step()
    assert {name: answers[name] for name in prompts} == {
        name: expected_tokens(prompt, 12) for name, prompt in prompts.items()
    }
    assert engine._scheduler.stats.pool.held == 0


def test_right_drafts_save_steps() -> None:
    engine = with_own_kv()
    add(engine, "a", max_tokens=60)
    assert tokens_of(run_to_end(engine)["a"]) == expected_tokens([1, 2, 3], 60)
    assert len(batches(engine)) < 30


def test_a_prompt_is_computed_by_both_models_chunk_by_chunk() -> None:
    engine = with_own_kv(max_num_batched_tokens=8)
    add(engine, "a", range(1, 21), max_tokens=2)
    run_to_end(engine)
    prefills = [batch.requests[0] for batch in batches(engine) if batch.phase is Phase.PREFILL]
    assert [each.draft_span for each in prefills] == [(each.start, each.end) for each in prefills]


def test_what_the_draft_model_has_not_computed_it_makes_up_for() -> None:
    """Steps right after a prompt's chunk draft nothing: the next draft begins some tokens earlier."""
    engine = with_own_kv(max_prefill_tokens_per_gap=4)
    add(engine, "a", max_tokens=60)
    while len(drafted(engine)) < 6:
        engine.step()
    add(engine, "b", range(1, 30), max_tokens=2)
    run_to_end(engine)
    spans = [each.draft_span for batch in drafted(engine) for each in batch.requests if each.draft_span]
    assert max(end - start for start, end in spans) > 2
    assert min(end - start for start, end in spans) == 2  # all drafts are right: their last one, and the token after it


@pytest.mark.parametrize(("has_head", "num_again"), [(False, 1), (True, 3)])
def test_an_mtp_head_computes_accepted_drafts_again(has_head: bool, num_again: int) -> None:
    """A draft model computes but the last of three draft tokens itself, and these are its own."""
    engine = with_own_kv(has_head=has_head)
    add(engine, "a", max_tokens=60)
    run_to_end(engine)
    spans = [batch.requests[0].draft_span for batch in drafted(engine) if batch.num_drafts == 3]
    assert len(spans) > 5 and {end - start for start, end in filter(None, spans[2:])} == {1 + num_again}


def test_a_cached_prefix_holds_the_draft_models_kv_too() -> None:
    engine = with_own_kv()
    add(engine, "a", range(1, 22), max_tokens=2)
    run_to_end(engine)
    add(engine, "b", range(1, 22), max_tokens=2)
    run_to_end(engine)
    assert next(each for each in batches(engine)[1:] if each.phase is Phase.PREFILL).requests[0].draft_span == (20, 21)


def test_where_a_cached_prefix_lacks_it_the_draft_model_computes_it() -> None:
    engine = with_own_kv()
    add(engine, "a", [5], max_tokens=20, output_token_ids=expected_tokens([5], 1))  # does not speculate
    text = [5, *expected_tokens([5], 20)]
    run_to_end(engine)
    num_before = len(batches(engine))
    add(engine, "b", text, max_tokens=2)
    updates = run_to_end(engine)["b"]
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == 20
    assert batches(engine)[num_before].requests[0].draft_span == (0, 21)


def test_requests_that_do_not_speculate_take_none_of_its_time() -> None:
    engine = with_own_kv()
    add(engine, "a", range(1, 9), max_tokens=9, output_token_ids=expected_tokens(range(1, 9), 2))
    run_to_end(engine)
    assert all(each.draft_span is None for batch in batches(engine) for each in batch.requests)


def request_with(num_tokens: int, num_computed: int, num_drafted: int = 0) -> Request:
    request = queued("a", [1] * num_tokens, may_speculate=True)
    request.num_computed_tokens, request.num_drafted_tokens = num_computed, num_drafted
    return request


@pytest.mark.parametrize(
    ("num_computed", "num_drafted", "expected"),
    [
        (0, 0, (0, 8)),
        (100, 100, (100, 108)),
        (100, 30, (30, 108)),
        (MAX_BEHIND, 0, (0, MAX_BEHIND + 8)),
        (2000, 100, (100, MAX_BEHIND + 108)),
    ],
)
def test_a_step_makes_up_for_a_bounded_number_of_tokens(
    num_computed: int, num_drafted: int, expected: tuple[int, int]
) -> None:
    assert OwnDraftKV(4).span(request_with(3000, num_computed, num_drafted), 8) == expected


def test_a_prefix_is_complete_up_to_the_first_block_that_is_not() -> None:
    kv = OwnDraftKV(4)
    first, second = request_with(30, 0), request_with(30, 0)
    first.block_table = [7, 8, 9, 6]
    kv.start(first, 0)
    kv.computed(first, 14, 14)
    second.block_table = [7, 8, 9, 6, 5]
    kv.start(second, 4)
    assert second.num_drafted_tokens == 12  # of the fourth block, two tokens are not computed
    kv.allocated([8])
    kv.start(second, 4)
    assert second.num_drafted_tokens == 4


@pytest.mark.slow
def test_a_model_that_is_always_wrong_is_hardly_asked() -> None:
    """Its passes are tried from time to time, with what it has to make up for."""
    engine = with_own_kv(errs=lambda: True, num_blocks=600)
    add(engine, "a", max_tokens=1500)
    run_to_end(engine)
    assert sum(batch.num_drafts for batch in batches(engine)) < 60
    assert (
        max(
            each.draft_span[1] - each.draft_span[0]
            for batch in drafted(engine)
            for each in batch.requests
            if each.draft_span
        )
        > 90
    )


def test_a_model_far_behind_catches_up_before_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduling.draft_kv.MAX_BEHIND", 3)
    engine = with_own_kv()
    add(engine, "a", [5], max_tokens=20, output_token_ids=expected_tokens([5], 1))  # does not speculate
    text = [5, *expected_tokens([5], 20)]
    run_to_end(engine)
    add(engine, "b", text, max_tokens=60)
    assert tokens_of(run_to_end(engine)["b"]) == expected_tokens(text, 60)
    assert drafted(engine)
