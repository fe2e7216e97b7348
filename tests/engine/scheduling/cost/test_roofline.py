"""The least time of a step equals sums over its tokens and the positions that they attend to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.machine import AttentionSize, Bound, Ceilings, ModelSize, StepFloor
from engine.core.sampling_params import SamplingParams
from engine.scheduling.cost.roofline import Roofline

ONE_BYTE_PER_SECOND = Ceilings(read_bytes_per_s=1.0, flops_per_s=1e30)
ONE_FLOP_PER_SECOND = Ceilings(read_bytes_per_s=1e30, flops_per_s=1.0)


def part(
    start: int, count: int, samples: bool = True, scores_prompt: bool = False, num_drafts: int = 0
) -> ScheduledRequest:
    prompt = [1] * (start + count)
    return ScheduledRequest(
        *("", [1] * count, start, (), SamplingParams(), prompt, [], samples),
        num_drafts=num_drafts,
        scores_prompt=scores_prompt,
    )


def floor_of(size: ModelSize, ceilings: Ceilings, *parts: ScheduledRequest) -> StepFloor:
    return Roofline(size, ceilings).floor_of(Batch(Phase.PREFILL, parts))


def test_weights_are_read_once_and_multiplied_for_each_token() -> None:
    size = ModelSize(layer_bytes=100, layer_flops=7, head_bytes=10, head_flops=3, attention=())
    parts = part(0, 5), part(9, 1)
    assert floor_of(size, ONE_BYTE_PER_SECOND, *parts) == (110, Bound.MEMORY)
    assert floor_of(size, ONE_FLOP_PER_SECOND, *parts) == (6 * 7 + 2 * 3, Bound.COMPUTE)


def test_each_pass_of_the_draft_model_reads_it_for_requests_that_want_more() -> None:
    size = ModelSize(layer_bytes=100, layer_flops=7, head_bytes=10, head_flops=3, attention=())
    attention = AttentionSize(None, bytes_per_token=1000, flops_per_pair=100)
    drafting = ModelSize(layer_bytes=40, layer_flops=2, head_bytes=5, head_flops=1, attention=(attention,))
    parts = [replace(part(9, 1 + num, num_drafts=num), num_wanted=num) for num in (2, 0, 1)]
    others = part(3, 2, num_drafts=1)  # a draft of its text
    batch = Batch(Phase.DECODE, (*parts, others))
    plans = [Roofline(size, each, drafting) for each in (ONE_BYTE_PER_SECOND, ONE_FLOP_PER_SECOND)]
    memory, compute = (plan.floor_of(batch).seconds for plan in plans)
    assert memory == 110 + 2 * 45 + 1000 * (10 + 10 + 11)
    assert compute == 8 * 10 + 3 * 3 + 100 * (10 + 10 + 11)
    assert plans[0].floor_of(Batch(Phase.DECODE, (others,))).seconds == 110
    cut = replace(part(9, 2, num_drafts=1), num_wanted=3)  # shortened by a grammar after all passes were made
    assert plans[0].floor_of(Batch(Phase.DECODE, (cut,))).seconds == 110 + 3 * 45 + 1000 * 33


def test_peaks_are_raised_to_what_is_measured_again_and_never_lowered() -> None:
    size = ModelSize(layer_bytes=100, layer_flops=7, head_bytes=10, head_flops=3, attention=())
    roofline = Roofline(size, Ceilings(2.0, 30.0, "int8", reads_cache=True, is_in_doubt=True), size)
    roofline.measured_again(Ceilings(5.0, 20.0))
    assert roofline.ceilings == Ceilings(5.0, 30.0, "int8", reads_cache=True)
    batch = Batch(Phase.DECODE, (replace(part(9, 2, num_drafts=1), num_wanted=1),))
    assert roofline.floor_of(batch).seconds == pytest.approx(2 * 110 / 5.0)  # the draft model's passes, too


def test_a_step_settles_no_doubt_about_the_peaks() -> None:
    size = ModelSize(layer_bytes=100, layer_flops=7, head_bytes=10, head_flops=3, attention=())
    roofline = Roofline(size, Ceilings(2.0, 30.0, is_in_doubt=True))
    roofline.observe(Batch(Phase.DECODE, (part(9, 1),)), 1.0)
    assert roofline.ceilings == Ceilings(110.0, 30.0, is_in_doubt=True)


def test_the_head_takes_part_where_logits_are_needed() -> None:
    size = ModelSize(layer_bytes=0, layer_flops=0, head_bytes=10, head_flops=3, attention=())
    assert floor_of(size, ONE_BYTE_PER_SECOND, part(0, 5, samples=False)).seconds == 0
    assert floor_of(size, ONE_FLOP_PER_SECOND, part(0, 5, samples=False)).seconds == 0
    assert floor_of(size, ONE_FLOP_PER_SECOND, part(0, 5, scores_prompt=True)).seconds == 15


def test_the_last_layer_is_multiplied_where_logits_are_needed() -> None:
    attention = AttentionSize(None, 0, flops_per_pair=100, flops_per_scored_pair=1000)
    size = ModelSize(layer_bytes=0, layer_flops=7, last_flops=2, head_bytes=0, head_flops=0, attention=(attention,))
    for request, num_scored, scored_pairs in [
        (part(2, 3), 1, 5),
        (part(2, 3, samples=False), 0, 0),
        (part(2, 3, samples=False, scores_prompt=True), 3, 3 + 4 + 5),
        (part(2, 3, num_drafts=1), 2, 4 + 5),
    ]:
        expected = 3 * 5 + num_scored * 2 + 100 * (3 + 4 + 5) + 1000 * scored_pairs
        assert floor_of(size, ONE_FLOP_PER_SECOND, request).seconds == expected


def test_tokens_read_the_experts_that_they_choose() -> None:
    size = ModelSize(
        layer_bytes=5, layer_flops=0, expert_bytes=800, expert_share=0.25, head_bytes=0, head_flops=0, attention=()
    )
    assert floor_of(size, ONE_BYTE_PER_SECOND, part(3, 1)).seconds == 5 + 200
    assert floor_of(size, ONE_BYTE_PER_SECOND, part(3, 1), part(4, 1)).seconds == 5 + 200 + 150
    assert floor_of(size, ONE_BYTE_PER_SECOND, part(0, 1000)).seconds == pytest.approx(805)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 40),
)
def test_attention_reads_each_position_once_and_multiplies_every_pair(
    chunks: list[tuple[int, int]], window: int | None
) -> None:
    size = ModelSize(layer_bytes=0, layer_flops=0, head_bytes=0, head_flops=0, attention=(AttentionSize(window, 2, 3),))
    seen = [
        [range(0 if window is None else max(0, token - window + 1), token + 1) for token in range(start, start + count)]
        for start, count in chunks
    ]
    parts = [part(*chunk) for chunk in chunks]
    num_positions = sum(len(set().union(*ranges)) for ranges in seen)
    assert floor_of(size, ONE_BYTE_PER_SECOND, *parts).seconds == 2 * num_positions
    assert floor_of(size, ONE_FLOP_PER_SECOND, *parts).seconds == 3 * sum(len(x) for ranges in seen for x in ranges)


def test_a_stream_begins_at_its_first_token() -> None:
    size = ModelSize(
        layer_bytes=100, layer_flops=7, head_bytes=10, head_flops=3, attention=(AttentionSize(None, 2, 5),)
    )
    assert Roofline(size, ONE_BYTE_PER_SECOND).floor_of_first_token().seconds == 112
    assert Roofline(size, ONE_FLOP_PER_SECOND).floor_of_first_token().seconds == 15


def test_what_takes_longer_is_the_bound() -> None:
    size = ModelSize(layer_bytes=100, layer_flops=10, head_bytes=0, head_flops=0, attention=())
    plan = Roofline(size, Ceilings(read_bytes_per_s=10.0, flops_per_s=5.0))
    assert plan.floor_of(Batch(Phase.DECODE, (part(7, 1),))) == (10.0, Bound.MEMORY)
    assert plan.floor_of(Batch(Phase.PREFILL, (part(0, 8),))) == (16.0, Bound.COMPUTE)


def batch_of(*parts: ScheduledRequest) -> Batch:
    return Batch(Phase.DECODE, parts)


def test_a_step_that_beats_a_ceiling_raises_it_and_no_other_does() -> None:
    size = ModelSize(layer_bytes=100, layer_flops=7, head_bytes=10, head_flops=3, attention=())
    plan = Roofline(size, Ceilings(read_bytes_per_s=11.0, flops_per_s=1.0))
    plan.observe(batch_of(part(0, 1)), 10.0)
    assert (plan.ceilings.read_bytes_per_s, plan.ceilings.flops_per_s) == (11.0, 1.0)
    plan.observe(batch_of(part(0, 1)), 5.0)
    assert (plan.ceilings.read_bytes_per_s, plan.ceilings.flops_per_s) == (22.0, 2.0)
    plan.observe(batch_of(part(0, 1)), 20.0)
    assert (plan.ceilings.read_bytes_per_s, plan.ceilings.flops_per_s) == (22.0, 2.0)


def test_what_caches_or_a_choice_of_experts_may_have_saved_raises_no_ceiling() -> None:
    """Requests that share a prefix read it once, and two tokens may choose the same expert."""
    attention = AttentionSize(None, bytes_per_token=1000, flops_per_pair=0)
    weights = {"layer_bytes": 100, "layer_flops": 0, "head_bytes": 10, "head_flops": 0}
    size = ModelSize(**weights, expert_bytes=80, expert_share=0.25, attention=(attention,))
    plan = Roofline(size, Ceilings(read_bytes_per_s=1.0, flops_per_s=1.0))
    plan.observe(batch_of(part(9, 1), part(9, 1)), 1.0)
    assert plan.ceilings.read_bytes_per_s == 100 + 10 + 80 / 4


def test_the_draft_model_is_priced_at_the_same_ceilings() -> None:
    size = ModelSize(layer_bytes=100, layer_flops=0, head_bytes=0, head_flops=0, attention=())
    plan = Roofline(size, ONE_BYTE_PER_SECOND, size)
    batch = batch_of(replace(part(9, 2, num_drafts=1), num_wanted=1))
    assert plan.floor_of(batch).seconds == 200
    plan.observe(batch, 50.0)
    assert plan.floor_of(batch).seconds == 100
