"""The share of experts that steps read is learnt by their numbers of tokens."""

import pytest

from engine.core.batch import Batch, Phase
from engine.core.machine import Bound, Ceilings, ModelSize
from engine.scheduling.cost.experts_read import ExpertsRead
from engine.scheduling.cost.roofline import Roofline
from engine.scheduling.cost.step_cost import StepCosts
from tests.engine.scheduling.cost.steps import decode, decoding

SIZE = ModelSize(
    layer_bytes=5, layer_flops=1, expert_bytes=800, expert_share=0.125, head_bytes=10, head_flops=1, attention=()
)
ONE_BYTE_PER_SECOND = Ceilings(read_bytes_per_s=1.0, flops_per_s=1e30)


def test_each_token_chooses_at_random_until_steps_tell_otherwise() -> None:
    experts = ExpertsRead(SIZE.experts_read)
    assert [experts.expected(num) for num in (0, 1, 7, 300)] == [SIZE.experts_read(num) for num in (0, 1, 7, 300)]
    for num_tokens in (1, 2, 7, 300):
        experts.observe(num_tokens, SIZE.experts_read(num_tokens))
    assert experts.expected(20) == pytest.approx(SIZE.experts_read(20))


@pytest.mark.parametrize("num_tokens", [2, 3, 8, 12, 31])
def test_rows_that_choose_the_same_expert_read_one(num_tokens: int) -> None:
    experts = ExpertsRead(SIZE.experts_read)
    experts.observe(8, 0.4)
    for _ in range(200):
        experts.observe(num_tokens, 0.125)
    assert experts.expected(num_tokens) == pytest.approx(0.125, rel=0.01)
    assert experts.expected(1) == 0.125


def test_steps_of_a_size_that_was_not_seen_are_as_those_of_the_nearest() -> None:
    experts = ExpertsRead(SIZE.experts_read)
    experts.observe(16, SIZE.experts_read(16) / 2)
    for num_tokens in (10, 16, 40, 1000):
        assert experts.expected(num_tokens) == SIZE.experts_read(num_tokens) / 2


def test_no_step_is_expected_to_read_less_than_one_token() -> None:
    experts = ExpertsRead(SIZE.experts_read)
    experts.observe(512, 0.125)
    assert experts.expected(40) == 0.125


def test_what_an_expert_costs_is_learnt_from_what_each_step_read() -> None:
    costs = StepCosts(SIZE.experts_read)
    for share in [0.25, 0.9] * 100:
        costs.observe(decode(8, 10), 0.004 + 0.040 * share, share)
    assert costs._models[Phase.DECODE].coefficients[-1] == pytest.approx(0.040, rel=0.1)


def test_small_and_large_steps_are_learnt_apart() -> None:
    experts = ExpertsRead(SIZE.experts_read)
    for _ in range(100):
        experts.observe(8, 0.25)
        experts.observe(300, 0.9)
        experts.observe(12, 0.3)
    learnt = [experts.expected(num) for num in (8, 12, 300)]
    assert learnt == pytest.approx([0.25, 0.3, 0.9], rel=0.02)


def test_a_model_without_experts_reads_none() -> None:
    experts = ExpertsRead(lambda num_tokens: 0.0)
    experts.observe(8, 0.5)
    assert experts.expected(8) == 0.0


def test_decode_steps_are_priced_by_what_their_like_read() -> None:
    """Streams of one text: four rows choose the experts of one, and a further row none."""
    costs = StepCosts(SIZE.experts_read)
    for rows, share in [(1, 0.125), (2, 0.125), (4, 0.125), (6, 0.125), (16, 0.5), (32, 0.9)] * 40:
        costs.observe(decode(rows, 10), 0.004 + 0.0001 * rows + 0.040 * share, share)
    for rows in (1, 4, 6):
        expected = 0.004 + 0.0001 * rows + 0.040 * 0.125
        assert costs.predict(decode(rows, 10)) == pytest.approx(expected, rel=0.05)
        assert expected * 0.95 <= costs.decode_bound(decoding(rows, 10)) <= expected * 1.3
    at_random = 0.0001 + 0.040 * (SIZE.experts_read(5) - SIZE.experts_read(4))
    assert 0.0001 <= costs.decode_price(decoding(4, 10)).token_s < at_random / 5


def test_the_roofline_claims_no_bytes_of_experts_that_were_not_read() -> None:
    batch = decode(8, 10)
    assert floor(batch, 0.125) == 5 + 100 + 10
    assert floor(batch, None) == pytest.approx(15 + 800 * SIZE.experts_read(8)), "not counted: at random"


def floor(batch: Batch, experts_read: float | None) -> float:
    seconds, bound = Roofline(SIZE, ONE_BYTE_PER_SECOND).floor_of(batch, experts_read)
    assert bound is Bound.MEMORY
    return seconds


def test_a_step_that_read_many_experts_shows_how_fast_memory_is() -> None:
    batch = decode(8, 10)
    for share, expected in [(0.5, 415.0), (0.125, 115.0), (None, 115.0)]:
        roofline = Roofline(SIZE, ONE_BYTE_PER_SECOND)
        roofline.observe(batch, 1.0, share)
        assert roofline.ceilings.read_bytes_per_s == expected
