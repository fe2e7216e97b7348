import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch, Phase, ScheduledRequest
from engine.engine import Engine
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from engine.speculation import Speculation, num_right, rows_of
from engine.step_cost import StepCosts
from tests.engine.fakes import FakeRunner, add, expected_tokens, fake_engine, run_to_end, tokens_of
from tests.engine.prophets import let_prophets_draft


def speculating(**settings: Any) -> Engine:
    """Its steps take no time, so every guess pays."""
    return fake_engine(clock=lambda: 0.0, **{"num_speculative_tokens": 3, **settings})


def batches(engine: Engine) -> list[Batch]:
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    return runner.batches


def test_right_guesses_save_steps() -> None:
    engine = speculating()
    let_prophets_draft(engine)
    add(engine, "a", [3, 1, 4], max_tokens=14)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens([3, 1, 4], 14)
    assert [len(update.token_ids) for update in updates] == [1, 1, 4, 4, 4]  # none right after the prompt


@pytest.mark.parametrize("max_tokens", range(2, 9))
def test_nothing_is_guessed_that_could_not_be_said(max_tokens: int) -> None:
    engine = speculating()
    let_prophets_draft(engine, errs=iter([True, False, False, False, False] * 100).__next__)
    add(engine, "a", [3, 1, 4], max_tokens=max_tokens)
    assert tokens_of(run_to_end(engine)["a"]) == expected_tokens([3, 1, 4], max_tokens)
    assert max(request.end for step in batches(engine) for request in step.requests) <= 3 + max_tokens - 1


def test_wrong_guesses_change_nothing() -> None:
    engine = speculating()
    let_prophets_draft(engine, errs=lambda: True)
    add(engine, "a", [3, 1, 4], max_tokens=14)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens([3, 1, 4], 14)
    assert all(len(update.token_ids) == 1 for update in updates)


@given(seed=st.integers(0, 10_000), block_size=st.integers(1, 5), num_blocks=st.integers(24, 60))
def test_requests_get_their_tokens_whatever_is_guessed(seed: int, block_size: int, num_blocks: int) -> None:
    """Blocks of wrong guesses are written again, shared by prefix, and preempted: the runner checks every read."""
    rng = random.Random(seed)
    engine = speculating(num_blocks=-(-num_blocks // block_size), block_size=block_size, max_prefill_tokens_per_gap=4)
    let_prophets_draft(engine, errs=lambda: rng.random() < 0.3)
    prompts = {str(i): [1 + rng.randrange(2) for _ in range(rng.randrange(1, 8))] for i in range(6)}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=12)
    updates = run_to_end(engine)
    for name, prompt in prompts.items():
        assert tokens_of(updates[name]) == expected_tokens(prompt, 12)
        assert updates[name][-1].finish_reason is FinishReason.LENGTH
    assert engine._pool.stats.held == 0


def test_what_was_guessed_right_can_be_shared_as_a_prefix() -> None:
    engine = speculating(block_size=2)
    let_prophets_draft(engine)
    add(engine, "a", [3, 1, 4], max_tokens=14)
    text = [3, 1, 4, *tokens_of(run_to_end(engine)["a"])]
    add(engine, "b", text, max_tokens=2)
    updates = run_to_end(engine)["b"]
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == 16
    assert tokens_of(updates) == expected_tokens(text, 2)


@pytest.mark.parametrize("position", range(2, 9))
def test_a_stop_among_right_guesses_ends_the_request(position: int) -> None:
    tokens = expected_tokens([9], 12)
    stop = tokens[position]
    engine = speculating()
    let_prophets_draft(engine)
    add(engine, "a", [9], max_tokens=12, stop_token_ids=[stop], logprobs=1)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == tokens[: tokens.index(stop) + 1]
    assert (updates[-1].finish_reason, updates[-1].stop_token_id) == (FinishReason.STOP, stop)
    assert engine._pool.stats.held == 0


def test_the_step_after_a_prompt_guesses_nothing() -> None:
    """The gap between two tokens has to hold both."""
    engine = speculating(max_prefill_tokens_per_gap=4)
    let_prophets_draft(engine)
    add(engine, "a", max_tokens=60)
    engine.step()
    add(engine, "b", range(1, 30), max_tokens=2)
    run_to_end(engine)
    steps = batches(engine)
    after_prefill = [step for before, step in pairwise(steps) if before.phase is Phase.PREFILL]
    decodes = [step for step in after_prefill if step.phase is Phase.DECODE]
    assert len(decodes) > 3
    assert all(request.num_drafts == 0 for step in decodes for request in step.requests)


def test_guesses_take_no_block_that_others_need() -> None:
    engine = speculating(num_blocks=7, block_size=2, enable_prefix_caching=False)
    let_prophets_draft(engine)
    for name in "ab":
        add(engine, name, [ord(name) % 50], max_tokens=6)
    updates = run_to_end(engine)
    assert all(updates[name][-1].num_preemptions == 0 for name in "ab")
    assert any(request.num_drafts for step in batches(engine) for request in step.requests)
    assert any(request.num_drafts < 3 for step in batches(engine)[3:] for request in step.requests)


def test_guesses_are_counted() -> None:
    engine = speculating()
    let_prophets_draft(engine, errs=iter([False, True, False] * 100).__next__)
    add(engine, "a", max_tokens=30)
    while engine.has_work:
        stats = engine.step().stats
    drafts = [request.num_drafts for step in batches(engine) for request in step.requests]
    assert stats.num_drafts == sum(drafts)
    assert stats.num_accepted_drafts == 30 - len(drafts)


def test_a_request_with_a_grammar_guesses_nothing() -> None:
    engine = speculating()
    drafter = engine._drafter_for(SamplingParams(grammar="start: /a+/"))
    assert list(drafter.draft([1] * 9, [], 3, 0.0)) == []


def scheduled(drafts: list[int], **params: Any) -> ScheduledRequest:
    tokens = [7, *drafts]
    return ScheduledRequest(
        "a", tokens, 4, (0, 1), SamplingParams(**params), [1, 2, 3, 4], [7], True, num_drafts=len(drafts)
    )


def test_each_guess_is_a_row_that_takes_those_before_for_said() -> None:
    rows = list(rows_of(scheduled([8, 9])))
    assert [(row.start, row.end, list(row.token_ids), list(row.output_token_ids)) for row in rows] == [
        (4, 5, [7], [7]),
        (5, 6, [8], [7, 8]),
        (6, 7, [9], [7, 8, 9]),
    ]
    assert all(row.num_drafts == 0 and row.samples for row in rows)
    alone = scheduled([])
    assert list(rows_of(alone)) == [alone]


@pytest.mark.parametrize(
    ("chosen", "count"), [([8, 9, 1], 2), ([8, 1, 9], 1), ([1, 9, 9], 0), ([None, 9, 9], 0), ([8, None, 1], 1)]
)
def test_guesses_are_right_up_to_the_first_that_is_not(chosen: list[int | None], count: int) -> None:
    assert num_right(scheduled([8, 9]), chosen) == count
    assert num_right(scheduled([]), chosen) == 0


def many(count: int) -> list[Request]:
    return [
        Request(str(i), [1], SamplingParams(max_tokens=20), 0.0, output_token_ids=[1], drafter=Echo())
        for i in range(count)
    ]


class Echo:
    """Guesses how likely guesses have to be, in percent."""

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int, min_chance: float) -> Sequence[int]:
        return [round(100 * min_chance)]


def test_a_guess_pays_if_it_brings_tokens_as_fast_as_the_step_does_and_is_tried_if_twice_as_fast() -> None:
    costs = StepCosts()
    requests = many(4)
    assert costs.chance_that_pays(requests) == 0.0  # nothing is known: try
    for count in [1, 5, 2, 8, 3] * 40:
        costs.observe(Batch(Phase.DECODE, (scheduled([0] * (count - 1)),)), 0.010 + 0.001 * count)
    assert costs.chance_that_pays(requests) == pytest.approx(4 * 0.001 / 0.014, rel=0.1)
    assert costs.chance_that_pays(requests[:1]) == pytest.approx(0.001 / 0.011, rel=0.1)
    speculation = Speculation(costs, 8)
    [[percent]] = speculation.draft(many(1))
    assert percent == pytest.approx(200 * 0.001 / 0.011, abs=2)
    assert all(speculation.draft(many(9)))  # 0.95
    assert speculation.draft(many(12)) == [()] * 12  # 1.1
