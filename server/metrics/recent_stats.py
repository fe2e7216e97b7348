"""Statistics of the newest requests and steps, for `GET /stats`: the history is for Prometheus to keep."""

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from engine.core.batch import Phase
from engine.core.machine import Bound
from engine.core.stats import RequestTimings, StepStats, nearest_rank
from server.protocol.stats import Percentiles, PrefixCacheTotals, RecentRequests, RecentSteps, Stats, Totals

NUM_REQUESTS, NUM_GAPS, NUM_STEPS = 1000, 10_000, 1000
"""How many of the newest requests, gaps between tokens, and steps of each phase are kept."""


class _End(msgspec.Struct, frozen=True, gc=False):
    time_s: float
    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    e2e_s: float


class _Step(msgspec.Struct, frozen=True, gc=False):
    num_tokens: int
    duration_s: float
    model_s: float
    floor_s: float
    bound: Bound | None
    is_certain: bool
    """Whether the machine's peaks, and so the floor, are not in doubt."""


class RecentStats:
    """Times of the newest requests, gaps and steps, and totals of all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = deque[_End](maxlen=NUM_REQUESTS)
        self._gaps_s = deque[float](maxlen=NUM_GAPS)
        self._steps = {phase: deque[_Step](maxlen=NUM_STEPS) for phase in Phase}
        self._num_prompt_tokens = self._num_tokens = self._num_ends = 0

    def add_prompt(self, num_tokens: int) -> None:
        self._num_prompt_tokens += num_tokens

    def add_tokens(self, num_tokens: int, gaps_s: Iterable[float]) -> None:
        self._num_tokens += num_tokens
        self._gaps_s.extend(gaps_s)

    def add_end(self, timings: RequestTimings | None) -> None:
        """Adds a request that ended. `timings` is None if it got no token: such a request is only counted."""
        self._num_ends += 1
        if timings is not None:
            spans = timings.queue_s, timings.prefill_s, timings.ttft_s, timings.decode_s, timings.e2e_s
            self._ends.append(_End(self._clock(), *spans))

    def add_step(self, stats: StepStats) -> None:
        """Adds a step, unless its duration at the machine's peaks (`floor_s`) is unknown."""
        if stats.phase is not None and stats.floor_s is not None:
            model_s = stats.model_s + stats.drafting_s
            self._steps[stats.phase].append(
                _Step(
                    *(stats.num_tokens, stats.duration_s, model_s, stats.floor_s, stats.bound),
                    is_certain=stats.certain_floor_s is not None,
                )
            )

    def summary(self, prefix_cache: PrefixCacheTotals) -> Stats:
        """Returns the body of `GET /stats`. Sorts some ten thousand numbers, which takes a millisecond or two."""
        ends = self._ends
        return Stats(
            totals=Totals(
                requests=self._num_ends, prompt_tokens=self._num_prompt_tokens, generated_tokens=self._num_tokens
            ),
            requests=RecentRequests(
                count=len(ends),
                over_s=round(self._clock() - ends[0].time_s, 1) if ends else 0.0,
                queue_ms=_percentiles(end.queue_s for end in ends),
                prefill_ms=_percentiles(end.prefill_s for end in ends),
                ttft_ms=_percentiles(end.ttft_s for end in ends),
                decode_ms=_percentiles(end.decode_s for end in ends),
                itl_ms=_percentiles(self._gaps_s),
                e2e_ms=_percentiles(end.e2e_s for end in ends),
            ),
            prefix_cache=prefix_cache,
            prefill=_summary_of(self._steps[Phase.PREFILL]),
            decode=_summary_of(self._steps[Phase.DECODE]),
        )


def _percentiles(seconds: Iterable[float]) -> Percentiles | None:
    ordered = sorted(seconds)
    if not ordered:
        return None
    p50, p90, p99 = (round(nearest_rank(ordered, percent) * 1e3, 3) for percent in (50, 90, 99))
    return Percentiles(p50=p50, p90=p90, p99=p99, max=round(ordered[-1] * 1e3, 3))


def _summary_of(steps: Iterable[_Step]) -> RecentSteps | None:
    steps = list(steps)
    if not steps:
        return None
    num_tokens, duration_s = sum(step.num_tokens for step in steps), sum(step.duration_s for step in steps)
    certain = [step for step in steps if step.is_certain]
    model_s = sum(step.model_s for step in certain)
    floors_s = {bound: sum(step.floor_s for step in steps if step.bound is bound) for bound in Bound}
    return RecentSteps(
        count=len(steps),
        tokens=round(num_tokens / len(steps), 3),
        mean_ms=round(duration_s / len(steps) * 1e3, 3),
        of_ceiling=round(sum(step.floor_s for step in certain) / model_s, 3) if model_s else None,
        bound=max(floors_s, key=floors_s.__getitem__).value,
    )
