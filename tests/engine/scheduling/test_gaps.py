"""Gaps between tokens of an engine whose steps advance its clock, by a law that it does not know."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest

from engine.assembly import assemble
from engine.core.batch import Batch, Phase, RequestStepOutput, StepOutput
from engine.core.config import EngineConfig
from engine.core.stats import StepStats
from engine.engine import Engine
from tests.engine.fakes import add, fake_info

MIN_CHUNK = 16
Law = Callable[[Batch], float]


class TimedRunner:
    """A runner whose every token is 1, with a clock that its steps advance."""

    def __init__(self, law: Law) -> None:
        self.now_s = 0.0
        self._law = law

    def prefill(self, batch: Batch) -> StepOutput:
        self.now_s += self._law(batch)
        return StepOutput(tuple(RequestStepOutput(each.request_id, (1,) * each.samples) for each in batch.requests))

    decode = prefill


def on_a_cpu(batch: Batch) -> float:
    """A step takes 34 ms to read the weights, 0.4 ms a token, and 0.1 us a pair of tokens in attention."""
    pairs = sum((request.start + request.end + 1) * len(request.token_ids) / 2 for request in batch.requests)
    rate = 7e-4 if batch.phase is Phase.DECODE else 4e-4
    return 0.034 + rate * batch.num_tokens + 1e-7 * pairs


def on_a_gpu(batch: Batch) -> float:
    """A step takes a hundredth of its time on a CPU, and 4 ms to start each layer's work."""
    return 0.004 + on_a_cpu(batch) / 100


def with_slow_attention(batch: Batch) -> float:
    """A decode step takes 5 us more for each token that a request attends to."""
    return on_a_cpu(batch) + (batch.phase is Phase.DECODE) * 5e-6 * sum(request.end for request in batch.requests)


def timed_engine(law: Law, target_ms: float) -> Engine:
    runner = TimedRunner(law)
    config = EngineConfig(model="fake", target_itl_ms=target_ms, max_num_batched_tokens=2048)
    return assemble(config, fake_info(4096, 16, 40_000), runner, clock=lambda: runner.now_s)


@cache
def loaded(law: Law, target_ms: float) -> list[StepStats]:
    """Returns the steps of an engine that has eight streams and always a long prompt to compute."""
    engine, steps = timed_engine(law, target_ms), []
    for index in range(8):
        add(engine, f"stream {index}", [2] * 30, max_tokens=30_000)
    for number in range(3000):
        if number % 200 == 20:
            add(engine, f"long {number}", [number // 200] + [3] * (500 * (1 + number // 200)), max_tokens=1)
        steps.append(engine.step().stats)
    return steps


def gaps(steps: list[StepStats]) -> list[float]:
    """Returns the time of each decode step with the prefill step before it, if there is one."""
    pairs = pairwise(steps)
    return [
        step.model_s + (before.model_s if before.phase is Phase.PREFILL else 0)
        for before, step in pairs
        if step.phase is Phase.DECODE
    ]


CASES = [
    *[(on_a_cpu, 200), (on_a_gpu, 20), (with_slow_attention, 500)],
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(on_a_cpu, 130), (on_a_gpu, 100)]),
]


@pytest.mark.parametrize(("law", "target_ms"), CASES)
def test_gaps_are_within_the_target(law: Law, target_ms: float) -> None:
    found = gaps(loaded(law, target_ms))
    late = [gap for gap in found[1:] if gap > target_ms / 1000]
    assert late == []


@pytest.mark.parametrize("law", [on_a_cpu, on_a_gpu])
def test_no_gap_is_predicted_to_be_longer_than_the_target(law: Law) -> None:
    steps = loaded(law, 140)
    predicted = [
        (prefill.predicted_s or 0) + (decode.predicted_s or 0)
        for prefill, decode in pairwise(steps)
        if (prefill.phase, decode.phase) == (Phase.PREFILL, Phase.DECODE) and prefill.num_tokens > MIN_CHUNK
    ]
    assert 0 < max(predicted) <= 0.14


def is_mixed(before: StepStats, step: StepStats) -> bool:
    """Whether a gap holds a prefill step of a long prompt, not its last tokens only."""
    return (before.phase, step.phase) == (Phase.PREFILL, Phase.DECODE) and before.num_tokens > 5 * MIN_CHUNK


def test_the_time_that_the_target_leaves_is_used() -> None:
    steps = loaded(on_a_cpu, 200)[-1500:]
    mixed = [before.model_s + step.model_s for before, step in pairwise(steps) if is_mixed(before, step)]
    assert sum(mixed) / len(mixed) > 0.9 * 0.2


def test_long_prompts_are_read_while_streams_are_slower_than_the_target() -> None:
    pairs = pairwise(loaded(on_a_cpu, 10)[100:])
    shares = [a.model_s / b.model_s for a, b in pairs if a.phase is Phase.PREFILL and a.num_tokens > MIN_CHUNK]
    assert sorted(shares)[len(shares) // 2] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("law", [on_a_cpu, on_a_gpu, with_slow_attention])
def test_predictions_become_exact_where_the_law_is_simple(law: Law) -> None:
    for step in loaded(law, 200)[-500:]:
        assert step.predicted_s == pytest.approx(step.model_s, rel=0.02)


def test_a_restarted_engine_begins_anew() -> None:
    engine = timed_engine(on_a_cpu, 100)
    add(engine, "a")
    assert [engine.step().stats.predicted_s for _ in range(2)] == [None, None]
