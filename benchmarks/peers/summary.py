"""Summarizes runs: values per metric, their ratios to the subject's in the same round, and warnings."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.peers.comparison import Comparison, ServerResult
from loadtest.compare import METRICS, Metric, Ratio, ratio

MAX_FOREIGN_SHARE = 0.05  # of the CPU time of all cores; more is warned of


@dataclass(frozen=True)
class Value:
    """One metric of one server: its value in each round that has one, and the ratio to the subject's."""

    per_round: tuple[float, ...]
    ratio: Ratio | None

    @property
    def median(self) -> float:
        return statistics.median(self.per_round)


@dataclass(frozen=True)
class Section:
    """A scenario's group of requests, with values by server and metric; servers without any are left out."""

    scenario: str
    group: str
    servers: dict[str, dict[str, Value]]


def sections(comparison: Comparison) -> list[Section]:
    """Returns the sections in the order of the plan's scenarios, groups by name."""
    return [
        Section(scenario, group, _servers(comparison, scenario, group))
        for scenario in comparison.plan.scenarios
        for group in sorted(_groups(comparison, scenario))
    ]


def _groups(comparison: Comparison, scenario: str) -> set[str]:
    num_rounds = comparison.plan.rounds
    return {
        group for result in comparison.results for run in result.rounds(scenario, num_rounds) for group in run.groups
    }


def _servers(comparison: Comparison, scenario: str, group: str) -> dict[str, dict[str, Value]]:
    plan = comparison.plan
    subject = next(result for result in comparison.results if result.plan.name == plan.subject)
    found = {
        result.plan.name: {
            name: value
            for name, metric in METRICS.items()
            if (value := _value(metric, group, subject, result, scenario, plan.rounds)) is not None
        }
        for result in comparison.results
    }
    return {name: values for name, values in found.items() if values}


def _value(
    metric: Metric, group: str, subject: ServerResult, result: ServerResult, scenario: str, num_rounds: int
) -> Value | None:
    base, rounds = (one.rounds(scenario, num_rounds) for one in (subject, result))
    values = [metric(run.groups[group]) for run in rounds if group in run.groups]
    known = tuple(value for value in values if value is not None)
    return Value(known, ratio(metric, group, base, rounds)) if known else None


def warnings(comparison: Comparison) -> Iterator[str]:
    """Yields sentences on what a reader must know before trusting the numbers."""
    idle = comparison.idle_foreign_cpu_share
    if idle is not None and idle > MAX_FOREIGN_SHARE:
        yield f"before anything was started, others took {idle:.1%} of the CPU"
    for result in comparison.results:
        if result.plan.skipped:
            yield f"{result.plan.name} was left out: {result.plan.skipped}"
        for run in result.runs:
            where = f"{result.plan.name}, {run.scenario}, round {run.round_number + 1}"
            yield from (f"{where}: {sentence}" for sentence in filter(None, (run.problem, *run.warnings)))
            if run.foreign_cpu_share is not None and run.foreign_cpu_share > MAX_FOREIGN_SHARE:
                yield f"{where}: others took {run.foreign_cpu_share:.1%} of the CPU"
