"""Drafts save steps and never change tokens; a step tries those that are worth their time."""

import random
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.assembly import assemble
from engine.core.batch import Batch, Phase, StepOutput
from engine.core.config import EngineConfig
from engine.core.draft import Draft, NoDrafts
from engine.core.request import FinishReason, Request
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.scheduling.cost.step_cost import StepCosts, TokenPrice
from engine.scheduling.speculation.grammar_drafter import GrammarDrafter
from engine.scheduling.speculation.likeliest_drafter import LikeliestDrafter
from engine.scheduling.speculation.planner import SpeculationPlanner
from engine.scheduling.speculation.predicted_output import PredictedOutput
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from tests.engine.fakes import (
    EOS,
    FakeRunner,
    add,
    batches,
    expected_tokens,
    fake_engine,
    fake_info,
    run_to_end,
    tokens_of,
)
from tests.engine.grammar.matchers import DIGITS, compiler
from tests.engine.requests import queued
from tests.engine.scheduling.speculation.prophets import oracle_drafters, scheduled


def speculating(errs: Callable[[], bool] = lambda: False, **settings: Any) -> Engine:
    """Returns an engine whose drafters are oracles. Its steps take no time, so every draft pays."""
    return fake_engine(
        clock=lambda: 0.0, new_drafter=oracle_drafters(errs), **{"num_speculative_tokens": 3, **settings}
    )


def test_accepted_drafts_save_steps() -> None:
    engine = speculating()
    add(engine, "a", [3, 1, 4], max_tokens=14)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens([3, 1, 4], 14)
    assert [len(update.token_ids) for update in updates] == [1, 1, 4, 4, 4]  # none right after the prompt


@pytest.mark.parametrize("max_tokens", range(2, 9))
def test_no_draft_exceeds_max_tokens(max_tokens: int) -> None:
    engine = speculating(errs=iter([True, False, False, False, False] * 100).__next__)
    add(engine, "a", [3, 1, 4], max_tokens=max_tokens)
    assert tokens_of(run_to_end(engine)["a"]) == expected_tokens([3, 1, 4], max_tokens)
    assert max(request.end for step in batches(engine) for request in step.requests) <= 3 + max_tokens - 1


def test_rejected_drafts_change_nothing() -> None:
    engine = speculating(errs=lambda: True)
    add(engine, "a", [3, 1, 4], max_tokens=14)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens([3, 1, 4], 14)
    assert all(len(update.token_ids) == 1 for update in updates)


@given(seed=st.integers(0, 10_000), block_size=st.integers(1, 5), num_blocks=st.integers(24, 60))
def test_requests_get_their_tokens_whatever_is_drafted(seed: int, block_size: int, num_blocks: int) -> None:
    """Blocks of rejected drafts are written again, shared by prefix, and preempted: the runner checks every read."""
    rng = random.Random(seed)
    engine = speculating(
        errs=lambda: rng.random() < 0.3,
        num_blocks=-(-num_blocks // block_size),
        block_size=block_size,
        max_prefill_tokens_per_gap=4,
    )
    prompts = {str(i): [1 + rng.randrange(2) for _ in range(rng.randrange(1, 8))] for i in range(6)}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=12)
    updates = run_to_end(engine)
    for name, prompt in prompts.items():
        assert tokens_of(updates[name]) == expected_tokens(prompt, 12)
        assert updates[name][-1].finish_reason is FinishReason.LENGTH
    assert engine._scheduler.stats.pool.held == 0


def test_accepted_drafts_can_be_shared_as_a_prefix() -> None:
    engine = speculating(block_size=2)
    add(engine, "a", [3, 1, 4], max_tokens=14)
    text = [3, 1, 4, *tokens_of(run_to_end(engine)["a"])]
    add(engine, "b", text, max_tokens=2)
    updates = run_to_end(engine)["b"]
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == 16
    assert tokens_of(updates) == expected_tokens(text, 2)


@pytest.mark.parametrize("position", range(2, 9))
def test_a_stop_token_among_accepted_drafts_finishes_the_request(position: int) -> None:
    tokens = expected_tokens([9], 12)
    stop = tokens[position]
    engine = speculating()
    add(engine, "a", [9], max_tokens=12, stop_token_ids=[stop], logprobs=1)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == tokens[: tokens.index(stop) + 1]
    assert (updates[-1].finish_reason, updates[-1].stop_token_id) == (FinishReason.STOP, stop)
    assert engine._scheduler.stats.pool.held == 0


@pytest.mark.parametrize("min_tokens", [0, 8])
def test_eos_among_accepted_drafts_finishes_the_request_once_it_may(min_tokens: int) -> None:
    prompt = next([number] for number in range(1, 50) if EOS in expected_tokens([number], 7)[2:])
    tokens = expected_tokens(prompt, 12)
    engine = speculating()
    add(engine, "a", prompt, max_tokens=8, ignore_eos=False, min_tokens=min_tokens)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == (tokens[:8] if min_tokens else tokens[: tokens.index(EOS) + 1])
    assert engine._scheduler.stats.pool.held == 0


def test_the_step_after_a_prefill_drafts_nothing() -> None:
    """The gap between two tokens has to hold the prefill step and the decode step."""
    engine = speculating(max_prefill_tokens_per_gap=4)
    add(engine, "a", max_tokens=60)
    engine.step()
    add(engine, "b", range(1, 30), max_tokens=2)
    run_to_end(engine)
    steps = batches(engine)
    after_prefill = [step for before, step in pairwise(steps) if before.phase is Phase.PREFILL]
    decodes = [step for step in after_prefill if step.phase is Phase.DECODE]
    assert len(decodes) > 3
    assert all(request.num_drafts == 0 for step in decodes for request in step.requests)


def test_drafts_take_no_block_that_other_requests_need() -> None:
    engine = speculating(num_blocks=7, block_size=2, enable_prefix_caching=False)
    for name in "ab":
        add(engine, name, [ord(name) % 50], max_tokens=6)
    updates = run_to_end(engine)
    assert all(updates[name][-1].num_preemptions == 0 for name in "ab")
    assert any(request.num_drafts for step in batches(engine) for request in step.requests)
    assert any(request.num_drafts < 3 for step in batches(engine)[3:] for request in step.requests)


def test_blocks_of_rejected_drafts_are_freed() -> None:
    engine = speculating(errs=lambda: True, block_size=1)
    add(engine, "a", [3, 1, 4], max_tokens=9)
    while engine.has_work:
        engine.step()
        for request in engine._scheduler._running:
            assert len(request.block_table) <= request.num_tokens


def test_drafts_are_counted() -> None:
    engine = speculating(errs=iter([False, True, False] * 100).__next__)
    add(engine, "a", max_tokens=30)
    while engine.has_work:
        stats = engine.step().stats
    drafts = [request.num_drafts for step in batches(engine) for request in step.requests]
    assert stats.num_drafts == sum(drafts)
    assert stats.num_accepted_drafts == 30 - len(drafts)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [PromptLookup]),
        ({"constraint": compiler()(DIGITS)}, [GrammarDrafter, PromptLookup]),
        ({"params": SamplingParams(predicted_token_ids=(1, 2))}, [PredictedOutput, PromptLookup]),
    ],
    ids=["others", "with a grammar", "with a prediction"],
)
def test_each_request_gets_the_drafters_for_it(fields: dict[str, Any], expected: list[type]) -> None:
    request = queued("a", [1], **fields)
    fake_engine(num_speculative_tokens=3)._queue(request)
    assert isinstance(request.drafter, LikeliestDrafter) and request.may_speculate
    assert list(map(type, request.drafter._drafters)) == expected


@pytest.mark.parametrize(("max_tokens", "output"), [(0, []), (3, [1])], ids=["off", "begun by another engine"])
def test_some_requests_get_no_drafter(max_tokens: int, output: list[int]) -> None:
    request = queued("a", [1], output_token_ids=output)
    fake_engine(num_speculative_tokens=max_tokens)._queue(request)
    assert isinstance(request.drafter, NoDrafts) and not request.may_speculate


class FixedDrafter:
    """A drafter of some tokens with a given chance."""

    def __init__(self, chance: float, num_tokens: int = 2) -> None:
        self._draft = Draft(range(num_tokens), chance)

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return self._draft._replace(token_ids=self._draft.token_ids[:max_tokens])


def requests_with(*chances: float, num_tokens: int = 2) -> list[Request]:
    params = SamplingParams(max_tokens=100)
    return [
        queued("a", [1], params, output_token_ids=[1], drafter=FixedDrafter(chance, num_tokens)) for chance in chances
    ]


def costs_of(step_s: float, token_s: float) -> StepCosts:
    costs = StepCosts()
    for count in [1, 5, 2, 8, 3] * 40:
        costs.observe(Batch(Phase.DECODE, (scheduled([0] * (count - 1)),)), step_s + token_s * count)
    return costs


def lengths_of(planner: SpeculationPlanner, *chances: float) -> list[int]:
    return [len(draft.token_ids) for draft in planner.plan(requests_with(*chances))]


def test_what_a_token_costs_is_learnt() -> None:
    assert StepCosts().decode_price(requests_with(0.5)) == (0.0, 0.0, 0.0)
    step_s, token_s, draft_s = costs_of(0.010, 0.001).decode_price(requests_with(0.5, 0.5))
    assert draft_s == 0.0 and (step_s, token_s) == (pytest.approx(0.012, rel=0.02), pytest.approx(0.001, rel=0.1))


def test_a_draft_token_is_tried_if_it_brings_tokens_twice_as_fast_as_the_step() -> None:
    planner = SpeculationPlanner(costs_of(0.010, 0.001), 8, target_gap_s=1.0)
    # 1 ms of 11 for one request: its chance must be over 0.18. Of 12 for two: 0.33.
    assert lengths_of(planner, 0.15) == [0]
    assert lengths_of(planner, 0.25) == [1]
    assert lengths_of(planner, 0.5) == [2]
    assert lengths_of(planner, 0.5, 0.65) == [1, 2]
    assert lengths_of(planner, *[1.0] * 12) == [0] * 12  # 1.09


def test_a_draft_must_also_be_worth_what_it_costs_however_long_it_is() -> None:
    """Of a step of 10 ms and tokens of 0.1 ms, whose drafts cost 2 ms more."""
    planner, costs = SpeculationPlanner(StepCosts(), 8, target_gap_s=1.0), TokenPrice(0.010, 0.0001, 0.002)
    planner._costs.decode_price = lambda requests: costs  # type: ignore[method-assign]

    def length(chance: float, num_tokens: int) -> int:
        [plan] = planner.plan(requests_with(chance, num_tokens=num_tokens))
        return len(plan.token_ids)

    assert [length(0.4, num) for num in (1, 2, 8)] == [0, 2, 4], "0.42 tokens pay, 0.4 do not"
    assert [length(0.25, num) for num in (1, 2, 8)] == [0, 0, 0]
    assert length(0.9, 1) == 1


def test_drafts_make_a_step_half_as_long_again_at_most_and_the_likeliest_come_first() -> None:
    planner = SpeculationPlanner(costs_of(0.010, 0.001), 8, target_gap_s=1.0)
    drafting, [plain] = requests_with(0.9, 0.95, 1.0, num_tokens=4), requests_with(0.0, num_tokens=0)
    plans = planner.plan([*drafting, plain])
    assert [len(plan.token_ids) for plan in plans] == [1, 2, 4, 0]  # 7 ms, half of 14, are time for 7


def test_a_step_may_be_the_longer_the_more_tokens_it_brings_each_request() -> None:
    costs = costs_of(0.010, 0.001)

    def num_drafted(*chances: float) -> int:
        planner = SpeculationPlanner(costs, 32, target_gap_s=1.0)
        planner.on_step(64)
        return sum(len(plan.token_ids) for plan in planner.plan(requests_with(*chances, num_tokens=32)))

    assert num_drafted(1.0) == 32
    assert num_drafted(1.0, 1.0) == 64
    assert num_drafted(1.0, 0.0) == 6  # half of 12 ms


@pytest.mark.parametrize("chance", [0.7, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("token_s", [0.0003, 0.001, 0.002])
def test_a_draft_is_as_long_as_brings_most_tokens_a_second(chance: float, token_s: float) -> None:
    planner = SpeculationPlanner(costs_of(0.010, token_s), 32, target_gap_s=1.0)
    planner.on_step(64)
    price = planner._costs.decode_price(requests_with(chance))

    def rate(length: int) -> float:
        return sum(chance**index for index in range(length + 1)) / (price.step_s + length * price.token_s)

    best = max(range(33), key=rate)
    worth_it = sum(chance**length >= 2 * price.token_s / price.step_s for length in range(1, 33))
    [plan] = planner.plan(requests_with(chance, num_tokens=32))
    assert len(plan.token_ids) == min(best, worth_it) > 0


def test_drafts_keep_the_step_within_the_target_gap() -> None:
    assert lengths_of(SpeculationPlanner(costs_of(0.010, 0.0015), 8, target_gap_s=0.017), 0.9, 0.95, 1.0) == [0, 0, 1]
    assert lengths_of(SpeculationPlanner(costs_of(0.010, 0.0015), 8, target_gap_s=0.010), 0.9, 0.95, 1.0) == [0, 0, 0]


def test_a_mistaken_price_is_found_out() -> None:
    """By accident, the first step with a draft takes four times as long as it should; all steps have one request."""
    costs, tried = StepCosts(), []
    planner = SpeculationPlanner(costs, 8, target_gap_s=1.0)
    for step in range(1000):
        tried.append(lengths_of(planner, 0.8)[0] if step >= 5 else 0)
        seconds = (0.020 + 0.0003 * (1 + tried[-1])) * (4 if step == 5 else 1)
        costs.observe(Batch(Phase.DECODE, (scheduled([0] * tried[-1]),)), seconds)
        planner.on_step(tried[-1])
    assert tried[5] > 0 and tried[6:100] == [0] * 94
    assert min(tried[-100:]) > 0


def test_what_pays_is_always_tried() -> None:
    planner = SpeculationPlanner(costs_of(0.010, 0.001), 8, target_gap_s=1.0)
    assert {tuple(lengths_of(planner, 0.9, 0.5)) for _ in range(300)} == {(2, 1)}


def test_what_never_pays_is_hardly_tried() -> None:
    planner = SpeculationPlanner(costs_of(0.001, 0.020), 8, target_gap_s=1.0)
    assert [sum(lengths_of(planner, 0.9, 0.5)) for _ in range(1000)].count(0) == 990
    slow = SpeculationPlanner(costs_of(0.001, 0.020), 8, target_gap_s=0.040)
    assert [sum(lengths_of(slow, 0.9, 0.5)) for _ in range(1000)].count(0) == 1000


def test_while_nothing_is_known_no_more_than_twice_as_many_are_tried_as_were_before() -> None:
    planner = SpeculationPlanner(StepCosts(), 8, target_gap_s=1.0)
    sums = []
    for _ in range(5):
        sums.append(sum(lengths_of(planner, *[0.9] * 50)))
        planner.on_step(sums[-1])
    assert sums == [8, 16, 32, 64, 64]


def test_the_steps_of_others_stay_short() -> None:
    """One stream has no drafts, and seven have right ones, on a clock that tokens advance."""
    now_s = 0.0

    class TimedRunner(FakeRunner):
        def decode(self, batch: Batch) -> StepOutput:
            nonlocal now_s
            now_s += 0.034 + 0.004 * batch.num_tokens
            return super().decode(batch)

    config = EngineConfig(model="fake", block_size=4, num_speculative_tokens=8)
    new_drafter = chain([NoDrafts()], (oracle_drafters()() for _ in range(7))).__next__
    engine = assemble(config, fake_info(400, 4), TimedRunner(4), clock=lambda: now_s, new_drafter=new_drafter)
    for name in "abcdefgh":
        add(engine, name, [ord(name) % 50], max_tokens=60)
    steps = []
    while engine.has_work:
        steps.append(engine.step().stats.model_s)
    plain_s = 0.034 + 0.004 * 8
    assert engine._scheduler.stats.num_accepted_drafts > 0
    assert max(steps) <= 2 * plain_s  # the first ones, when nothing is known
    assert max(steps[6:]) <= 1.6 * plain_s
