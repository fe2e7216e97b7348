"""The draft length brings most tokens a second, at prices that are known."""

from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.batch import Batch, Phase
from engine.core.draft import Draft
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.speculation.draft_length import FastestDraftLength
from engine.scheduling.speculation.planner import NO_PLANNED_DRAFT, PlannedDraft, SpeculationPlanner
from tests.engine.requests import queued
from tests.engine.scheduling.speculation.prophets import scheduled
from tests.engine.scheduling.speculation.timed import PASS_S, STEP_S, TOKEN_S


def costs_of(pass_s: float = PASS_S, token_s: float = TOKEN_S) -> StepCosts:
    """Returns costs that observed steps of one request, and passes of the draft model for it."""
    costs = StepCosts()
    for num_drafts in [0, 4, 1, 7, 2] * 40:
        batch = Batch(Phase.DECODE, (scheduled([0] * num_drafts, num_wanted=num_drafts),))
        costs.observe(batch, STEP_S + token_s * num_drafts)
        if num_drafts:
            costs.observe_drafting(batch, pass_s * num_drafts)
    return costs


def requests_with(*chances: float, **fields: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 100, **fields})
    return [
        queued("a", [1, 2, 3, 4], params, output_token_ids=[7], may_speculate=True, draft_acceptance=chance)
        for chance in chances
    ]


def length_policy(costs: StepCosts, max_tokens: int = 8, target_gap_s: float = 1.0) -> FastestDraftLength:
    return FastestDraftLength(costs, max_tokens, target_gap_s)


def planner_with(costs: StepCosts) -> SpeculationPlanner:
    return SpeculationPlanner(costs, 8, 1.0, length_policy(costs))


def lengths_of(policy: FastestDraftLength, requests: Sequence[Request], rate: float) -> list[int]:
    return policy.lengths(requests, rate, policy._costs.decode_price(requests))


def rate_of(chance: float, num_passes: int) -> float:
    num_tokens = sum(chance**index for index in range(num_passes + 1))
    return num_tokens / (STEP_S + num_passes * (PASS_S + TOKEN_S))


@pytest.mark.parametrize("chance", [0.35, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_as_many_passes_as_bring_most_tokens_a_second(chance: float) -> None:
    best = max(range(9), key=lambda num_passes: rate_of(chance, num_passes))
    assert lengths_of(length_policy(costs_of()), requests_with(chance), rate_of(chance, 0)) == [best]


def test_no_pass_where_passes_hardly_bring_more_tokens() -> None:
    policy = length_policy(costs_of())
    assert lengths_of(policy, requests_with(0.3), 1 / STEP_S) == [0]
    assert lengths_of(policy, requests_with(0.8), rate_of(0.8, 2) / 1.02) == [0]
    assert lengths_of(policy, requests_with(0.8), rate_of(0.8, 2) / 1.08) == [2]
    assert lengths_of(length_policy(costs_of(pass_s=0.011)), requests_with(0.95), 1 / STEP_S) == [0]


def test_no_more_than_are_allowed_fit_into_a_gap_or_could_be_taken() -> None:
    assert lengths_of(length_policy(costs_of(), max_tokens=2), requests_with(0.95), 0.0) == [2]
    assert lengths_of(length_policy(costs_of()), requests_with(0.99), 0.0) == [8]
    assert lengths_of(length_policy(costs_of(), target_gap_s=0.0375), requests_with(0.99), 0.0) == [6]  # 35.2 ms
    assert lengths_of(length_policy(costs_of(), target_gap_s=0.001), requests_with(0.99), 0.0) == [4]  # 26.8 of 30 ms
    assert lengths_of(length_policy(costs_of()), [*requests_with(0.95, max_tokens=4)], 0.0) == [2]
    assert lengths_of(length_policy(costs_of()), [*requests_with(0.95, max_tokens=2)], 0.0) == [0]


def test_no_request_is_slowed_down_but_at_its_end() -> None:
    policy = length_policy(costs_of())
    assert lengths_of(policy, requests_with(0.9, 0.9), 0.0) == [4, 4]
    assert lengths_of(policy, requests_with(0.9, 0.2), 0.0) == [0, 0]
    assert lengths_of(policy, [*requests_with(0.9), *requests_with(0.9, max_tokens=2)], 0.0) == [1, 0]


def test_passes_are_priced_by_the_tokens_that_they_add() -> None:
    """A request that is at its end adds no tokens: one of the four."""
    costs = costs_of(token_s=0.002)
    requests = [*requests_with(0.9, 0.9, 0.9), *requests_with(0.9, max_tokens=2)]
    step_s, token_s, _ = costs.decode_price(requests)
    rates = [
        (3 * sum(0.9**index for index in range(count + 1)) + 1) / (step_s + count * (PASS_S + 3 * token_s))
        for count in range(4)
    ]
    best = max(range(4), key=rates.__getitem__)
    assert best > 0
    counts = [best] * 3 + [0]
    assert lengths_of(length_policy(costs), requests, rates[best] / 1.06) == counts
    assert lengths_of(length_policy(costs), requests, rates[best] / 1.04) == [0] * 4


@pytest.mark.parametrize(("num_left", "count"), [(0, 1), (1, 0)])
def test_a_request_that_could_take_its_draft_is_not_slowed_down(num_left: int, count: int) -> None:
    requests = [*requests_with(0.99), *requests_with(0.01, max_tokens=2 + num_left)]
    assert lengths_of(length_policy(costs_of(), max_tokens=1), requests, 0.0) == [count, 0]


def test_a_request_that_cannot_take_all_of_its_draft_limits_no_other() -> None:
    requests = [*requests_with(0.99), *requests_with(0.5, max_tokens=3)]
    assert lengths_of(length_policy(costs_of(pass_s=0.002)), requests, 0.0) == [8, 1]


def test_passes_that_pay_are_always_made() -> None:
    policy = length_policy(costs_of())
    assert [lengths_of(policy, requests_with(0.9), 1 / STEP_S) for _ in range(300)] == [[4]] * 300


def test_certainty_is_no_division_by_zero() -> None:
    assert lengths_of(length_policy(costs_of()), requests_with(1.0), 0.0) == [8]


def test_requests_begun_by_another_engine_draft_nothing_and_are_not_slowed_down() -> None:
    [begun] = requests_with(0.95)
    begun.may_speculate = False
    policy = length_policy(costs_of())
    assert lengths_of(policy, [begun], 0.0) == [0]
    assert lengths_of(policy, [begun, *requests_with(0.95)], 0.0) == [0, 0]


def test_without_a_draft_model_nothing_is_wanted_of_it() -> None:
    planner = SpeculationPlanner(costs_of(), 8, 1.0)
    assert [planner.plan(requests_with(0.9)) for _ in range(300)] == [[NO_PLANNED_DRAFT]] * 300


def test_the_time_of_a_pass_is_learnt_from_the_first_passes() -> None:
    costs = StepCosts()
    policy = FastestDraftLength(costs, 8, 1.0)
    assert lengths_of(policy, requests_with(0.9), 0.0) == [0]  # before it is known what a step takes
    tried = []
    for _ in range(8):
        batch = Batch(Phase.DECODE, (scheduled([0] * sum(tried[-1:]), num_wanted=sum(tried[-1:])),))
        costs.observe(batch, STEP_S)
        if tried:
            costs.observe_drafting(batch, PASS_S * tried[-1] * (20 if len(tried) == 1 else 1))  # the first by accident
        tried += lengths_of(policy, requests_with(0.9), 1 / STEP_S)
    assert tried[:4] == [1, 1, 1, 1]
    assert min(tried[4:]) > 1


def test_passes_that_do_not_pay_are_retried_from_time_to_time() -> None:
    policy = length_policy(costs_of())
    counts = [lengths_of(policy, requests_with(0.1), 1 / STEP_S) for _ in range(303)]
    assert [index for index, count in enumerate(counts) if count != [0]] == [100, 201, 302]


def test_a_retry_is_of_the_request_of_whose_tokens_the_draft_model_lacks_fewest() -> None:
    policy = length_policy(costs_of())
    requests = requests_with(0.1, 0.1, 0.1, 0.1)
    for request, num_computed, num_drafted in zip(requests, (90, 60, 80, 50), (10, 50, 75, 50), strict=True):
        request.num_computed_tokens, request.num_drafted_tokens = num_computed, num_drafted
    requests[3].may_speculate = False
    tried = [lengths for _ in range(303) if any(lengths := lengths_of(policy, requests, 4 / STEP_S))]
    assert tried == [[0, 0, 1, 0]] * 3


def test_a_retry_that_was_due_when_no_request_could_draft_is_made_up_for() -> None:
    policy = length_policy(costs_of())
    ending = requests_with(0.1, max_tokens=2)
    assert [lengths_of(policy, ending, 1 / STEP_S) for _ in range(150)] == [[0]] * 150
    assert [lengths_of(policy, requests_with(0.1), 1 / STEP_S) for _ in range(3)] == [[1], [0], [0]]


def test_acceptance_is_learnt_for_each_request_and_for_new_ones() -> None:
    policy = length_policy(costs_of())
    steady, erring, new = (requests_with(0.8)[0] for _ in range(3))
    new.draft_acceptance = None
    for _ in range(60):
        policy.learn(steady, [3, 4], [3, 4, 5])
        policy.learn(erring, [3, 4], [7])
    assert steady.draft_acceptance is not None and steady.draft_acceptance > 0.95
    assert erring.draft_acceptance is not None and erring.draft_acceptance < 0.05
    assert lengths_of(policy, [erring], 1 / STEP_S) == [0] != lengths_of(policy, [steady], 1 / STEP_S)
    [count] = lengths_of(policy, [new], 1 / STEP_S)
    assert 0 < count < lengths_of(policy, [steady], 1 / STEP_S)[0]
    for _ in range(30):
        policy.learn(erring, [3, 4], [7])
    assert lengths_of(policy, [new], 1 / STEP_S) == [0]


def test_some_rejections_in_a_row_do_not_end_drafting() -> None:
    policy = length_policy(costs_of())
    [request] = requests_with(0.9)
    for _ in range(4):
        policy.learn(request, [3, 4], [7])
    assert lengths_of(policy, [request], 1 / STEP_S)[0] > 1


def test_only_drafts_of_the_draft_model_change_its_acceptance() -> None:
    planner = planner_with(costs_of())
    [request] = requests_with(0.9)
    planner.learn(request, scheduled([8, 9]), [7], num_accepted=0)
    assert (request.draft_acceptance, planner.num_drafts) == (0.9, 2)
    planner.learn(request, scheduled([8, 9], num_wanted=2), [8, 7], num_accepted=1)
    assert request.draft_acceptance != 0.9
    assert (planner.num_drafts, planner.num_accepted) == (4, 1)


def test_a_draft_token_that_a_grammar_forbids_counts_as_rejected() -> None:
    """A grammar shortens a draft before the step."""
    planner = planner_with(costs_of())
    [right, cut, none] = requests_with(0.5, 0.5, 0.5)
    planner.learn(right, scheduled([8], num_wanted=1), [8, 7], num_accepted=1)
    planner.learn(cut, scheduled([8], num_wanted=3), [8, 7], num_accepted=1)
    planner.learn(none, scheduled([], num_wanted=3), [7], num_accepted=0)
    assert right.draft_acceptance is not None and cut.draft_acceptance is not None and none.draft_acceptance is not None
    assert right.draft_acceptance > cut.draft_acceptance > none.draft_acceptance
    assert none.draft_acceptance < 0.5


class FixedDrafter:
    """A drafter of two tokens with a given chance."""

    def __init__(self, chance: float) -> None:
        self._chance = chance

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return Draft([1, 2][:max_tokens], self._chance)


@pytest.mark.parametrize(
    ("chance", "token_s", "expected"),
    [
        (0.95, TOKEN_S, PlannedDraft([1, 2])),
        (0.2, TOKEN_S, PlannedDraft(num_wanted=2)),
        (0.35, TOKEN_S, PlannedDraft([1, 2])),  # 1.47 in 10.4 ms, against 2.44 in 18.4
        (0.25, 0.0012, PlannedDraft(num_wanted=2)),  # 1.25 in 11.2 ms, against 2.44 in 20.4
    ],
)
def test_drafts_of_the_text_are_preferred_where_they_bring_more(
    chance: float, token_s: float, expected: PlannedDraft
) -> None:
    [request] = requests_with(0.8)
    request.drafter = FixedDrafter(chance)
    planner = planner_with(costs_of(token_s=token_s))
    assert planner.plan([request]) == [expected]
