"""How many passes of the draft weights a step has: policy, on prices that are known."""

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
from tests.engine.scheduling.speculation.prophets import scheduled
from tests.engine.scheduling.speculation.timed import PASS_S, STEP_S, TOKEN_S


def taught(pass_s: float = PASS_S, token_s: float = TOKEN_S) -> StepCosts:
    """Of steps of one request and passes of the draft weights for it."""
    costs = StepCosts()
    for num_drafts in [0, 4, 1, 7, 2] * 40:
        batch = Batch(Phase.DECODE, (scheduled([0] * num_drafts, num_wanted=num_drafts),))
        costs.observe(batch, STEP_S + token_s * num_drafts)
        if num_drafts:
            costs.observe_drafting(batch, pass_s * num_drafts)
    return costs


def those_with(*chances: float, **fields: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 100, **fields})
    return [
        Request("a", [1, 2, 3, 4], params, 0.0, output_token_ids=[7], may_speculate=True, draft_acceptance=chance)
        for chance in chances
    ]


def drafts_of(costs: StepCosts, max_tokens: int = 8, target_gap_s: float = 1.0) -> FastestDraftLength:
    return FastestDraftLength(costs, max_tokens, target_gap_s)


def speculation_on(costs: StepCosts) -> SpeculationPlanner:
    return SpeculationPlanner(costs, 8, 1.0, drafts_of(costs))


def counts_of(drafts: FastestDraftLength, requests: Sequence[Request], rate: float) -> list[int]:
    return drafts.counts(requests, rate, drafts._costs.decode_price(requests))


def rate_of(chance: float, num_passes: int) -> float:
    num_said = sum(chance**index for index in range(num_passes + 1))
    return num_said / (STEP_S + num_passes * (PASS_S + TOKEN_S))


@pytest.mark.parametrize("chance", [0.35, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_as_many_passes_as_bring_most_tokens_a_second(chance: float) -> None:
    best = max(range(9), key=lambda num_passes: rate_of(chance, num_passes))
    assert counts_of(drafts_of(taught()), those_with(chance), rate_of(chance, 0)) == [best]


def test_none_where_they_hardly_bring_more_than_there_is_without() -> None:
    drafts = drafts_of(taught())
    assert counts_of(drafts, those_with(0.3), 1 / STEP_S) == [0]
    assert counts_of(drafts, those_with(0.8), rate_of(0.8, 2) / 1.02) == [0]
    assert counts_of(drafts, those_with(0.8), rate_of(0.8, 2) / 1.08) == [2]
    assert counts_of(drafts_of(taught(pass_s=0.011)), those_with(0.95), 1 / STEP_S) == [0]


def test_no_more_than_are_allowed_fit_into_a_gap_or_could_be_said() -> None:
    assert counts_of(drafts_of(taught(), max_tokens=2), those_with(0.95), 0.0) == [2]
    assert counts_of(drafts_of(taught()), those_with(0.99), 0.0) == [8]
    assert counts_of(drafts_of(taught(), target_gap_s=0.0375), those_with(0.99), 0.0) == [6]  # 35.2 ms
    assert counts_of(drafts_of(taught(), target_gap_s=0.001), those_with(0.99), 0.0) == [4]  # 26.8 ms, of three steps
    assert counts_of(drafts_of(taught()), [*those_with(0.95, max_tokens=4)], 0.0) == [2]
    assert counts_of(drafts_of(taught()), [*those_with(0.95, max_tokens=2)], 0.0) == [0]


def test_no_request_is_slowed_down_but_at_its_end() -> None:
    drafts = drafts_of(taught())
    assert counts_of(drafts, those_with(0.9, 0.9), 0.0) == [4, 4]
    assert counts_of(drafts, those_with(0.9, 0.2), 0.0) == [0, 0]
    assert counts_of(drafts, [*those_with(0.9), *those_with(0.9, max_tokens=2)], 0.0) == [1, 0]


def test_passes_are_priced_by_the_tokens_that_they_add() -> None:
    """One of four that is at its end adds none."""
    costs = taught(token_s=0.002)
    requests = [*those_with(0.9, 0.9, 0.9), *those_with(0.9, max_tokens=2)]
    step_s, token_s = costs.decode_price(requests)
    rates = [
        (3 * sum(0.9**index for index in range(count + 1)) + 1) / (step_s + count * (PASS_S + 3 * token_s))
        for count in range(4)
    ]
    best = max(range(4), key=rates.__getitem__)
    assert best > 0
    counts = [best] * 3 + [0]
    assert counts_of(drafts_of(costs), requests, rates[best] / 1.06) == counts
    assert counts_of(drafts_of(costs), requests, rates[best] / 1.04) == [0] * 4


@pytest.mark.parametrize(("num_left", "count"), [(0, 1), (1, 0)])
def test_who_could_say_what_is_guessed_is_not_held_up(num_left: int, count: int) -> None:
    requests = [*those_with(0.99), *those_with(0.01, max_tokens=2 + num_left)]
    assert counts_of(drafts_of(taught(), max_tokens=1), requests, 0.0) == [count, 0]


def test_who_cannot_say_all_that_is_guessed_limits_nobody() -> None:
    requests = [*those_with(0.99), *those_with(0.5, max_tokens=3)]
    assert counts_of(drafts_of(taught(pass_s=0.002)), requests, 0.0) == [8, 1]


def test_what_pays_is_always_done() -> None:
    drafts = drafts_of(taught())
    assert [counts_of(drafts, those_with(0.9), 1 / STEP_S) for _ in range(300)] == [[4]] * 300


def test_certainty_is_no_division_by_zero() -> None:
    assert counts_of(drafts_of(taught()), those_with(1.0), 0.0) == [8]


def test_requests_begun_by_another_engine_guess_nothing_and_are_not_slowed_down() -> None:
    [begun] = those_with(0.95)
    begun.may_speculate = False
    drafts = drafts_of(taught())
    assert counts_of(drafts, [begun], 0.0) == [0]
    assert counts_of(drafts, [begun, *those_with(0.95)], 0.0) == [0, 0]


def test_without_draft_weights_there_are_none() -> None:
    speculation = SpeculationPlanner(taught(), 8, 1.0)
    assert [speculation.plan(those_with(0.9)) for _ in range(300)] == [[NO_PLANNED_DRAFT]] * 300


def test_what_a_pass_takes_is_learnt_from_some() -> None:
    costs = StepCosts()
    drafts = FastestDraftLength(costs, 8, 1.0)
    assert counts_of(drafts, those_with(0.9), 0.0) == [0]  # before it is known what a step takes
    tried = []
    for _ in range(8):
        batch = Batch(Phase.DECODE, (scheduled([0] * sum(tried[-1:]), num_wanted=sum(tried[-1:])),))
        costs.observe(batch, STEP_S)
        if tried:
            costs.observe_drafting(batch, PASS_S * tried[-1] * (20 if len(tried) == 1 else 1))  # the first by accident
        tried += counts_of(drafts, those_with(0.9), 1 / STEP_S)
    assert tried[:4] == [1, 1, 1, 1]
    assert min(tried[4:]) > 1


def test_what_does_not_pay_is_tried_again_from_time_to_time() -> None:
    drafts = drafts_of(taught())
    counts = [counts_of(drafts, those_with(0.1), 1 / STEP_S) for _ in range(303)]
    assert [index for index, count in enumerate(counts) if count != [0]] == [100, 201, 302]


def test_a_try_that_was_due_when_nobody_could_guess_is_made_up_for() -> None:
    drafts = drafts_of(taught())
    ending = those_with(0.1, max_tokens=2)
    assert [counts_of(drafts, ending, 1 / STEP_S) for _ in range(150)] == [[0]] * 150
    assert [counts_of(drafts, those_with(0.1), 1 / STEP_S) for _ in range(3)] == [[1], [0], [0]]


def test_each_request_learns_and_those_to_come_learn_from_it() -> None:
    drafts = drafts_of(taught())
    steady, erring, new = (those_with(0.8)[0] for _ in range(3))
    new.draft_acceptance = None
    for _ in range(60):
        drafts.learn(steady, [3, 4], [3, 4, 5])
        drafts.learn(erring, [3, 4], [7])
    assert steady.draft_acceptance is not None and steady.draft_acceptance > 0.95
    assert erring.draft_acceptance is not None and erring.draft_acceptance < 0.05
    assert counts_of(drafts, [erring], 1 / STEP_S) == [0] != counts_of(drafts, [steady], 1 / STEP_S)
    [count] = counts_of(drafts, [new], 1 / STEP_S)
    assert 0 < count < counts_of(drafts, [steady], 1 / STEP_S)[0]
    for _ in range(30):
        drafts.learn(erring, [3, 4], [7])
    assert counts_of(drafts, [new], 1 / STEP_S) == [0]


def test_some_errors_in_a_row_end_no_guesses() -> None:
    drafts = drafts_of(taught())
    [request] = those_with(0.9)
    for _ in range(4):
        drafts.learn(request, [3, 4], [7])
    assert counts_of(drafts, [request], 1 / STEP_S)[0] > 1


def test_only_guesses_of_the_draft_weights_tell_of_them() -> None:
    speculation = speculation_on(taught())
    [request] = those_with(0.9)
    speculation.learn(request, scheduled([8, 9]), [7], num_accepted=0)
    assert (request.draft_acceptance, speculation.num_drafts) == (0.9, 2)
    speculation.learn(request, scheduled([8, 9], num_wanted=2), [8, 7], num_accepted=1)
    assert request.draft_acceptance != 0.9
    assert (speculation.num_drafts, speculation.num_accepted) == (4, 1)


def test_a_guess_that_a_grammar_forbids_was_wrong() -> None:
    """It is cut off before the step."""
    speculation = speculation_on(taught())
    [right, cut, none] = those_with(0.5, 0.5, 0.5)
    speculation.learn(right, scheduled([8], num_wanted=1), [8, 7], num_accepted=1)
    speculation.learn(cut, scheduled([8], num_wanted=3), [8, 7], num_accepted=1)
    speculation.learn(none, scheduled([], num_wanted=3), [7], num_accepted=0)
    assert right.draft_acceptance is not None and cut.draft_acceptance is not None and none.draft_acceptance is not None
    assert right.draft_acceptance > cut.draft_acceptance > none.draft_acceptance
    assert none.draft_acceptance < 0.5


class Sure:
    """Guesses two tokens with a certain chance."""

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
def test_guesses_of_the_text_come_first_where_they_bring_more(
    chance: float, token_s: float, expected: PlannedDraft
) -> None:
    [request] = those_with(0.8)
    request.drafter = Sure(chance)
    speculation = speculation_on(taught(token_s=token_s))
    assert speculation.plan([request]) == [expected]
