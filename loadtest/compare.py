"""Comparison of several servers: ratios of metrics measured in the same round, and their spread over the rounds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.intervals import ratio_interval
from loadtest.results import RunResult
from loadtest.stats import Distribution, Sample, Summary

Metric = Callable[[Summary], float | None]


def _latency(sample_of: Callable[[Summary], Sample], pick: Callable[[Distribution], float]) -> Metric:
    def value(summary: Summary) -> float | None:
        distribution = sample_of(summary).distribution()
        return None if distribution is None else pick(distribution)

    return value


SAMPLES: Mapping[str, Callable[[Summary], Sample]] = {
    "TTFT": lambda summary: summary.ttft_ms,
    "ITL": lambda summary: summary.itl_ms,
    "TPOT": lambda summary: summary.tpot_ms,
    "E2E": lambda summary: summary.e2e_ms,
}
_PICKS: Mapping[str, Callable[[Distribution], float]] = {
    "mean": lambda distribution: distribution.mean,
    "p50": lambda distribution: distribution.p50,
    "p90": lambda distribution: distribution.p90,
    "p99": lambda distribution: distribution.p99,
}
THROUGHPUT: Mapping[str, Metric] = {
    "requests/s": lambda summary: summary.per_second(summary.num_ok),
    "output tok/s": lambda summary: summary.token_rate(summary.completion_tokens),
    "prompt tok/s": lambda summary: summary.token_rate(summary.prompt_tokens),
}
METRICS: Mapping[str, Metric] = {
    f"{name} {statistic} ms": _latency(sample_of, pick)
    for name, sample_of in SAMPLES.items()
    for statistic, pick in _PICKS.items()
} | dict(THROUGHPUT)


@dataclass(frozen=True)
class Ratio:
    """Ratio of one server's metric to the first server's, in each round in which both have it."""

    per_round: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.per_round)

    @property
    def mean(self) -> float:
        """The geometric mean; 0 if a round has a ratio of 0."""
        return statistics.geometric_mean(self.per_round) if min(self.per_round) > 0 else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean; None where there are too few rounds for one."""
        return ratio_interval(self.per_round)

    @property
    def is_different(self) -> bool:
        """Whether the interval excludes 1: the servers differ in this metric, as far as these rounds tell."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


def ratio(metric: Metric, group: str, base: Sequence[RunResult], other: Sequence[RunResult]) -> Ratio | None:
    """Returns the ratios of two servers' rounds, paired in their order. None if no round has both values."""
    pairs = [
        (metric(of_base.groups[group]), metric(of_other.groups[group]))
        for of_base, of_other in zip(base, other, strict=False)  # the last round may be incomplete
        if group in of_base.groups and group in of_other.groups
    ]
    ratios = tuple(value / base_value for base_value, value in pairs if base_value and value is not None)
    return Ratio(ratios) if ratios else None
