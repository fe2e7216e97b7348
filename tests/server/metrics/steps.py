"""Steps as an engine reports them, for tests of what is told of them."""

from engine.core.batch import Phase
from engine.core.machine import Bound
from engine.core.stats import PoolStats, StepStats


def step(phase: Phase | None, end_s: float, duration_s: float, num_tokens: int = 8, held: int = 1) -> StepStats:
    return StepStats(
        phase=phase,
        num_requests=2,
        num_tokens=num_tokens,
        num_generated=num_tokens if phase is Phase.DECODE else 0,
        duration_s=duration_s,
        model_s=duration_s / 2,
        drafting_s=duration_s / 4,
        floor_s=duration_s / 5,
        bound=Bound.MEMORY,
        end_s=end_s,
        num_running=2,
        num_waiting=1,
        pool=PoolStats(free=10 - held, held=held, cached=0),
        num_preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
    )
