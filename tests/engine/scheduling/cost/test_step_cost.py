"""Steps and draft passes are predicted from their tokens, requests and contexts, each phase by itself."""

import pytest

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.machine import ModelSize
from engine.core.sampling_params import SamplingParams
from engine.scheduling.cost.step_cost import NO_PREFILL, StepCosts, with_chunk
from tests.engine.scheduling.cost.steps import decode, decoding


def duration(num_rows: int, context: int) -> float:
    return 0.02 + 0.002 * num_rows + 1e-6 * num_rows * context


CASES = [(1, 10), (8, 10), (1, 9000), (8, 9000), (4, 3000)]


def test_decode_steps_take_time_by_their_rows_and_contexts() -> None:
    costs = StepCosts()
    for rows, context in CASES * 40:
        costs.observe(decode(rows, context), duration(rows, context))
    for rows, context in CASES:
        assert costs.predict(decode(rows, context)) == pytest.approx(duration(rows, context), rel=0.02)
        assert (
            duration(rows, context) * 0.98
            <= costs.decode_bound(decoding(rows, context))
            <= duration(rows, context) * 1.2
        )


def test_the_phases_know_nothing_of_each_other() -> None:
    costs = StepCosts()
    costs.observe(decode(8, 100), 0.03)
    assert costs.prefill_bound(with_chunk(NO_PREFILL, 0, 16, False)) == 0


def test_a_cached_prefix_saves_its_tokens_and_not_the_step() -> None:
    costs = StepCosts()
    assert costs.prefill_saving(100) == 0.0
    for start, count in [(0, 50), (0, 100), (0, 400), (400, 100), (1000, 16), (0, 1000)] * 40:
        pairs = count * start + count * (count + 1) // 2
        row = ScheduledRequest("", (1,) * count, start, (), SamplingParams(), (1,) * (start + count), (), samples=False)
        costs.observe(Batch(Phase.PREFILL, (row,)), 0.01 + 1e-4 * count + 1e-7 * pairs)
    assert costs.prefill_saving(0) == 0.0
    assert costs.prefill_saving(400) == pytest.approx(0.04 + 1e-7 * 80_200, rel=0.05)


def test_a_token_attends_to_itself_and_all_before_it() -> None:
    work = with_chunk(with_chunk(NO_PREFILL, 0, 3, False), 10, 2, True)
    assert work == (5, 1, 2, (1 + 2 + 3) + (11 + 12), 2)


def prefill(num_tokens: int) -> Batch:
    prompt = range(num_tokens)
    return Batch(Phase.PREFILL, (ScheduledRequest("", prompt, 0, (), SamplingParams(), prompt, (), True),))


@pytest.mark.parametrize(("first", "second"), [(96, 187), (256, 16)])
def test_after_a_single_prefill_step_more_tokens_are_known_to_take_longer(first: int, second: int) -> None:
    costs = StepCosts()
    costs.observe(prefill(first), 0.0018 * first)
    assert costs.predict(prefill(second)) == pytest.approx(0.0018 * second, rel=0.35)


def drafted(num_rows: int, context: int, *counts: int) -> Batch:
    """Returns a step of `num_rows` requests with one draft token each, and then one with each of `counts`; `context` is
    the number of tokens that each has."""
    rows = [
        ScheduledRequest("", (1,) * (1 + num), context - 1, (), SamplingParams(), (), (1,), True, (), num, num)
        for num in [*[1] * num_rows, *counts]
    ]
    return Batch(Phase.DECODE, tuple(rows))


def test_passes_of_the_draft_model_take_time_as_steps_do() -> None:
    costs = StepCosts()
    assert costs.drafting_price(decoding(1, 10)) == 0.0
    for rows, context in CASES * 40:
        costs.observe_drafting(drafted(rows, context), duration(rows, context))
    for rows, context in CASES:
        assert costs.drafting_price(decoding(rows, context)) == pytest.approx(duration(rows, context), rel=0.02)
    assert costs.decode_price(decoding(1, 10)) == (0.0, 0.0, 0.0)


def with_states(num_rows: int, *counts: int) -> Batch:
    """Returns a step of `num_rows` requests with states and no draft, and then one with each of `counts`."""
    rows = [
        ScheduledRequest("", (1,) * (1 + num), 9, (), SamplingParams(), (), (1,), True, (), num, state_slot=0)
        for num in [*[0] * num_rows, *counts]
    ]
    return Batch(Phase.DECODE, tuple(rows))


def test_states_that_a_draft_has_advance_once_more_take_time() -> None:
    costs, requests = StepCosts(), decoding(2, 10)
    for request in requests:
        request.state_slot = 0
    for num_rows, *counts in [(1,), (2,), (0, 3), (0, 1), (1, 2), (4,), (0, 5, 1), (2, 4, 4)] * 40:
        num_passes, num_tokens = num_rows + 2 * len(counts), num_rows + len(counts) + sum(counts)
        costs.observe(with_states(num_rows, *counts), 0.020 + 0.0005 * num_tokens + 0.002 * num_passes)
    price = costs.decode_price(requests)
    assert price == pytest.approx((0.025, 0.0005, 0.002), rel=0.05)
    assert price.seconds([0, 4]) == pytest.approx(0.029, rel=0.05)


def test_more_tokens_choose_fewer_further_experts_each() -> None:
    def experts_read(num_tokens: int) -> float:
        return 1 - 0.875**num_tokens

    costs = StepCosts(experts_read)
    for rows in [1, 2, 3, 5, 8, 12, 16] * 40:
        costs.observe(decode(rows, 10), 0.004 + 0.0001 * rows + 0.040 * experts_read(rows))
    for rows in (1, 4, 16):
        expected = 0.004 + 0.0001 * rows + 0.040 * experts_read(rows)
        assert costs.predict(decode(rows, 10)) == pytest.approx(expected, rel=0.01)
        price = costs.decode_price(decoding(rows, 10))
        assert price == pytest.approx((expected, 0.0001 + 0.040 * 0.125 * 0.875**rows, 0.0), rel=0.05)
    size = ModelSize(layer_bytes=1, layer_flops=1, head_bytes=1, head_flops=1, attention=())
    assert size.experts_read(100) == 0.0, "a model without experts"


def test_passes_without_a_draft_token_are_not_observed() -> None:
    costs = StepCosts()
    costs.observe_drafting(decode(2, 10), 0.01)
    assert (costs.num_drafting_steps, costs.drafting_price(decoding(1, 10))) == (0, 0.0)


def test_the_contexts_of_passes_grow_with_the_drafts() -> None:
    costs = StepCosts()
    for context, num_drafts in [(5, 1), (9, 2), (30, 1)] * 40:
        positions = range(context, context + num_drafts)
        costs.observe_drafting(drafted(0, context, num_drafts), 0.001 * sum(positions))
    assert costs.drafting_price(decoding(1, 7)) == pytest.approx(0.007, rel=0.01)


def test_each_pass_has_the_requests_that_still_want_a_draft_token() -> None:
    costs = StepCosts()
    for rows, context in CASES * 40:
        costs.observe_drafting(drafted(rows, context), duration(rows, context))
    passes = duration(3, 10) + duration(1, 11) + duration(1, 12)
    for _ in range(200):
        costs.observe_drafting(drafted(0, 10, 1, 3, 1), passes)
        costs.observe_drafting(drafted(3, 10), duration(3, 10))
    assert costs.drafting_price(decoding(3, 10)) == pytest.approx(duration(3, 10), rel=0.02)
    assert costs.drafting_price(decoding(1, 10)) == pytest.approx(duration(1, 10), rel=0.05)
