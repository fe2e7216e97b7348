"""The table of a sweep on the console, and the values that it and the plot show."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.benchmark import Benchmark
from loadtest.campaign import Campaign
from loadtest.compare import METRICS
from loadtest.config import SweepKind
from loadtest.formats import format_number
from loadtest.results import TargetResult
from loadtest.stats import Summary

SHOWN = ("TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "output tok/s", "requests/s")


@dataclass(frozen=True)
class Row:
    """What one target did at one load, in one group of requests."""

    load: float
    group: str
    summary: Summary

    def value(self, metric: str) -> float | None:
        return METRICS[metric](self.summary)


def rows_of(campaign: Campaign, label: str) -> list[Row]:
    """Returns the rows of a target, by load and group."""
    return [
        Row(load, name, summary)
        for load, benchmark in loads(campaign)
        for result in benchmark.results
        if result.target.label == label
        for name, summary in sorted(result.groups.items())
    ]


def loads(campaign: Campaign) -> Iterator[tuple[float, Benchmark]]:
    """Yields each load with its benchmark, as far as the sweep has come."""
    assert campaign.config.sweep is not None
    yield from zip(campaign.config.sweep.loads, campaign.benchmarks, strict=False)


def targets_of(campaign: Campaign) -> list[TargetResult]:
    """Returns the first benchmark's targets: all have the same."""
    return campaign.benchmarks[0].results


def print_sweep(console: Console, campaign: Campaign, title: str, warnings: list[str]) -> None:
    """Prints a table per target."""
    assert campaign.config.sweep is not None
    load_name = "requests/s offered" if campaign.config.sweep.kind is SweepKind.RATE else "concurrency"
    console.print(Text(title))
    for target in targets_of(campaign):
        console.print(Text(f"{target.target.label}  {target.target.url}, model {target.model}"))
        console.print(_table(rows_of(campaign, target.target.label), load_name))
    if campaign.is_interrupted:
        console.print(Text("Interrupted: these are the results so far.", style="yellow"))
    for warning in warnings:
        console.print(Text(f"WARNING  {warning}", style="bold red"))


def _table(rows: list[Row], load_name: str) -> Table:
    has_groups = len({row.group for row in rows}) > 1
    has_targets = any(row.summary.targets.is_set for row in rows)
    table = Table()
    for name in (load_name, *(["group"] if has_groups else []), "ok", "failed", *SHOWN):
        table.add_column(name, justify="right")
    if has_targets:
        table.add_column("goodput", justify="right")
    for row in rows:
        cells = [f"{row.load:g}", *([row.group] if has_groups else [])]
        cells += [str(row.summary.num_ok), str(row.summary.num_requests - row.summary.num_ok)]
        cells += [format_number(row.value(name)) for name in SHOWN]
        table.add_row(*cells, *([f"{row.summary.good_fraction or 0.0:.0%}"] if has_targets else []))
    return table
