"""How many passes of the draft weights a step has: policy, on prices that are known."""

from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch, Phase
from engine.drafter import Draft, NoDrafts, PromptLookup
from engine.model_drafts import ModelDrafts
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.speculation import Guesses, Speculation
from engine.step_cost import StepCosts
from tests.engine.fakes import add, batches, expected_tokens, run_to_end, tokens_of
from tests.engine.prophets import scheduled
from tests.engine.timed import PASS_S, STEP_S, TOKEN_S, Timed, drafting_engine


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
        Request("a", [1, 2, 3, 4], params, 0.0, output_token_ids=[7], drafter=PromptLookup(), draft_chance=chance)
        for chance in chances
    ]


def experienced(costs: StepCosts, max_tokens: int = 8, target_gap_s: float = 1.0) -> ModelDrafts:
    """It has tried its first ones."""
    drafts = ModelDrafts(costs, max_tokens, target_gap_s)
    for _ in range(4):
        assert drafts.counts(those_with(0.9), 0.0) == [1]
    return drafts


def rate_of(chance: float, num_passes: int) -> float:
    num_said = sum(chance**index for index in range(num_passes + 1))
    return num_said / (STEP_S + num_passes * (PASS_S + TOKEN_S))


@pytest.mark.parametrize("chance", [0.35, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_as_many_passes_as_bring_most_tokens_a_second(chance: float) -> None:
    best = max(range(9), key=lambda num_passes: rate_of(chance, num_passes))
    assert experienced(taught()).counts(those_with(chance), rate_of(chance, 0)) == [best]


def test_none_where_they_hardly_bring_more_than_there_is_without() -> None:
    drafts = experienced(taught())
    assert drafts.counts(those_with(0.3), 1 / STEP_S) == [0]
    assert drafts.counts(those_with(0.8), rate_of(0.8, 2) / 1.02) == [0]
    assert drafts.counts(those_with(0.8), rate_of(0.8, 2) / 1.08) == [2]
    assert experienced(taught(pass_s=0.011)).counts(those_with(0.95), 1 / STEP_S) == [0]


def test_no_more_than_are_allowed_fit_into_a_gap_or_could_be_said() -> None:
    assert experienced(taught(), max_tokens=2).counts(those_with(0.95), 0.0) == [2]
    assert experienced(taught(), target_gap_s=0.0195).counts(those_with(0.95), 0.0) == [2]
    assert experienced(taught()).counts([*those_with(0.95, max_tokens=4)], 0.0) == [2]
    assert experienced(taught()).counts([*those_with(0.95, max_tokens=2)], 0.0) == [0]


def test_no_request_is_slowed_down_but_at_its_end() -> None:
    drafts = experienced(taught())
    assert drafts.counts(those_with(0.9, 0.9), 0.0) == [4, 4]
    assert drafts.counts(those_with(0.9, 0.2), 0.0) == [0, 0]
    assert drafts.counts([*those_with(0.9), *those_with(0.9, max_tokens=2)], 0.0) == [1, 0]


def test_requests_begun_by_another_engine_guess_nothing_and_are_not_slowed_down() -> None:
    [begun] = those_with(0.95)
    begun.drafter = NoDrafts()
    drafts = experienced(taught())
    assert drafts.counts([begun], 0.0) == [0]
    assert drafts.counts([begun, *those_with(0.95)], 0.0) == [0, 0]


def test_without_draft_weights_there_are_none() -> None:
    drafts = ModelDrafts(taught(), 0, 1.0)
    assert [drafts.counts(those_with(0.9), 0.0) for _ in range(300)] == [[0]] * 300


def test_what_a_pass_takes_is_learnt_from_some() -> None:
    costs = StepCosts()
    drafts = ModelDrafts(costs, 8, 1.0)
    assert drafts.counts(those_with(0.9), 0.0) == [0]  # before it is known what a step takes
    tried = []
    for _ in range(8):
        batch = Batch(Phase.DECODE, (scheduled([0] * sum(tried[-1:]), num_wanted=sum(tried[-1:])),))
        costs.observe(batch, STEP_S)
        if tried:
            costs.observe_drafting(batch, PASS_S * tried[-1] * (20 if len(tried) == 1 else 1))  # the first by accident
        tried += drafts.counts(those_with(0.9), 1 / STEP_S)
    assert tried[:4] == [1, 1, 1, 1]
    assert min(tried[4:]) > 1


def test_what_does_not_pay_is_tried_again_from_time_to_time() -> None:
    drafts = experienced(taught())
    counts = [drafts.counts(those_with(0.1), 1 / STEP_S) for _ in range(303)]
    assert [index for index, count in enumerate(counts) if count != [0]] == [100, 201, 302]
    slow = ModelDrafts(taught(), 8, target_gap_s=STEP_S / 2)
    assert all(slow.counts(those_with(0.9), 0.0) == [0] for _ in range(300))


def test_a_try_that_does_not_fit_into_a_gap_is_made_up_for() -> None:
    class Changing(StepCosts):
        step_s = STEP_S

        def decode_price(self, requests: Sequence[Request]) -> tuple[float, float]:
            return self.step_s, TOKEN_S

    costs = Changing()
    drafts = experienced(costs, target_gap_s=1.0)
    costs.observe_drafting(Batch(Phase.DECODE, (scheduled([0], num_wanted=1),)), PASS_S)
    costs.step_s = 2.0
    assert [drafts.counts(those_with(0.1), 1 / STEP_S) for _ in range(150)] == [[0]] * 150
    costs.step_s = STEP_S
    assert [1] in [drafts.counts(those_with(0.1), 1 / STEP_S) for _ in range(101)]


def test_each_request_learns_and_those_to_come_learn_from_it() -> None:
    drafts = experienced(taught())
    steady, erring, new = (those_with(0.8)[0] for _ in range(3))
    new.draft_chance = None
    for _ in range(60):
        drafts.learn(steady, [3, 4], [3, 4, 5])
        drafts.learn(erring, [3, 4], [7])
    assert steady.draft_chance is not None and steady.draft_chance > 0.95
    assert erring.draft_chance is not None and erring.draft_chance < 0.05
    assert drafts.counts([erring], 1 / STEP_S) == [0] != drafts.counts([steady], 1 / STEP_S)
    [count] = drafts.counts([new], 1 / STEP_S)
    assert 0 < count < drafts.counts([steady], 1 / STEP_S)[0]
    for _ in range(30):
        drafts.learn(erring, [3, 4], [7])
    assert drafts.counts([new], 1 / STEP_S) == [0]


def test_some_errors_in_a_row_end_no_guesses() -> None:
    drafts = experienced(taught())
    [request] = those_with(0.9)
    for _ in range(4):
        drafts.learn(request, [3, 4], [7])
    assert drafts.counts([request], 1 / STEP_S)[0] > 1


def test_only_guesses_of_the_draft_weights_tell_of_them() -> None:
    speculation = Speculation(taught(), 8, 1.0, has_draft_weights=True)
    [request] = those_with(0.9)
    speculation.learn(request, scheduled([8, 9]), [7], num_accepted=0)
    assert (request.draft_chance, speculation.num_drafts) == (0.9, 2)
    speculation.learn(request, scheduled([8, 9], num_wanted=2), [8, 7], num_accepted=1)
    assert request.draft_chance != 0.9
    assert (speculation.num_drafts, speculation.num_accepted) == (4, 1)


class Sure:
    """Guesses two tokens with a certain chance."""

    def __init__(self, chance: float) -> None:
        self._chance = chance

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return Draft([1, 2][:max_tokens], self._chance)


@pytest.mark.parametrize(
    ("chance", "token_s", "expected"),
    [
        (0.95, TOKEN_S, Guesses([1, 2])),
        (0.2, TOKEN_S, Guesses(num_wanted=2)),
        (0.35, TOKEN_S, Guesses([1, 2])),  # 1.47 in 10.4 ms, against 2.44 in 18.4
        (0.25, 0.0012, Guesses(num_wanted=2)),  # 1.25 in 11.2 ms, against 2.44 in 20.4
    ],
)
def test_guesses_of_the_text_come_first_where_they_bring_more(chance: float, token_s: float, expected: Guesses) -> None:
    [request] = those_with(0.8)
    request.drafter = Sure(chance)
    speculation = Speculation(taught(token_s=token_s), 8, 1.0, has_draft_weights=True)
    for _ in range(4):
        speculation.plan([request])
    assert speculation.plan([request]) == [expected]


@given(pattern=st.lists(st.booleans(), min_size=1, max_size=7), block_size=st.integers(1, 5), seed=st.integers(0, 99))
def test_requests_get_their_tokens_whatever_the_draft_weights_guess(
    pattern: list[bool], block_size: int, seed: int
) -> None:
    """The runner checks every read: what the draft weights wrote is never read as the model's."""
    turns = count()
    runner = Timed(block_size, errs=lambda: pattern[next(turns) % len(pattern)])
    engine = drafting_engine(runner, num_blocks=-(-40 // block_size), max_prefill_tokens_per_gap=4)
    prompts = {str(index): [1 + (seed + index) % 3] * (1 + index) for index in range(4)}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=12)
    updates = run_to_end(engine)
    for name, prompt in prompts.items():
        assert tokens_of(updates[name]) == expected_tokens(prompt, 12)
    assert engine._pool.stats.held == 0


def test_right_guesses_save_steps_and_all_are_counted_and_timed() -> None:
    engine = drafting_engine(Timed(4))
    add(engine, "a", max_tokens=60)
    steps = []
    while engine.has_work:
        steps.append(engine.step().stats)
    ran = [request for batch in batches(engine) for request in batch.requests]
    assert len(steps) < 30
    assert steps[-1].num_drafts == sum(request.num_drafts for request in ran)
    assert steps[-1].num_accepted_drafts == 60 - len(steps)
    for stats, request in zip(steps, ran, strict=True):
        assert (stats.drafting_s > 0) == (request.num_wanted > 0)
        assert stats.floor_s == pytest.approx(0.001 * (1 + request.num_drafts))


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_are_taken_for_what_will_be_guessed(block_size: int) -> None:
    engine = drafting_engine(Timed(block_size))
    add(engine, "a", max_tokens=40)
    run_to_end(engine)
    counts = [batch.num_drafts for batch in batches(engine)]
    assert counts[-6:-1] == [3] * 5
    assert engine._pool.stats.held == 0


def test_what_passes_take_is_measured() -> None:
    class Slow(Timed):
        def draft(self, batch: Batch) -> Batch:
            self.now_s += STEP_S
            return super().draft(batch)

    engine = drafting_engine(Slow(4))
    add(engine, "a", max_tokens=90)
    run_to_end(engine)
    assert sum(batch.num_drafts for batch in batches(engine)) == 4  # to learn that they do not pay


def test_the_step_after_a_prompt_wants_no_guesses() -> None:
    engine = drafting_engine(Timed(4), max_prefill_tokens_per_gap=4)
    add(engine, "a", max_tokens=60)
    while sum(batch.num_drafts for batch in batches(engine)) < 9:
        engine.step()
    add(engine, "b", range(1, 30), max_tokens=2)
    run_to_end(engine)
    after = [step for before, step in pairwise(batches(engine)) if before.phase is Phase.PREFILL]
    assert len(after) > 3
    assert all(step.num_drafts == 0 for step in after)


def test_draft_weights_that_raise_end_the_requests_of_their_step_only() -> None:
    class Broken(Timed):
        def draft(self, batch: Batch) -> Batch:
            raise RuntimeError("broken")

    engine = drafting_engine(Broken(4))
    add(engine, "a", max_tokens=20)
    [*_, last] = run_to_end(engine)["a"]
    assert last.error is not None and "broken" in last.error
    add(engine, "b", max_tokens=2)
    assert tokens_of(run_to_end(engine)["b"]) == expected_tokens([1, 2, 3], 2)
