"""The picture of a sweep: latencies, throughput and goodput against the load."""

from collections.abc import Callable

from loadtest.campaign import Campaign
from loadtest.config import SweepKind
from loadtest.sweep.svg import Line, Panel, picture
from loadtest.sweep.table import Row, rows_of, targets_of

Value = Callable[[Row], float | None]


def plot(campaign: Campaign, title: str) -> str:
    """Returns the SVG text. Each target has a color, and so has each group where requests are in groups."""
    assert campaign.config.sweep is not None
    series: dict[str, list[Row]] = {}
    for result in targets_of(campaign):
        name = f"{result.target.label}  {result.target.url}"
        rows = rows_of(campaign, result.target.label)
        groups = sorted({row.group for row in rows})
        for group in groups:
            series[f"{name}, {group}" if len(groups) > 1 else name] = [row for row in rows if row.group == group]
    panels = [_latency("TTFT", series), _latency("ITL", series)]
    panels.append(_panel("output tokens per second", series, [lambda row: row.value("output tok/s")]))
    panels.append(_panel("good requests, %", series, [_good_percent]))
    is_rate = campaign.config.sweep.kind is SweepKind.RATE
    return picture(title, "requests offered per second" if is_rate else "concurrency", list(series), panels)


def _latency(name: str, series: dict[str, list[Row]]) -> Panel:
    values: list[Value] = [lambda row: row.value(f"{name} p50 ms"), lambda row: row.value(f"{name} p99 ms")]
    return _panel(f"{name}, ms: p50, and p99 dashed", series, values, may_be_log=True)


def _panel(title: str, series: dict[str, list[Row]], values: list[Value], may_be_log: bool = False) -> Panel:
    """Returns a panel with a line per series and value; the second value's are dashed."""
    lines = [
        Line(
            name=name,
            series=number,
            points=tuple((row.load, found) for row in rows if (found := value(row)) is not None),
            is_dashed=place > 0,
        )
        for number, (name, rows) in enumerate(series.items())
        for place, value in enumerate(values)
    ]
    return Panel(title, tuple(lines), may_be_log)


def _good_percent(row: Row) -> float | None:
    share = row.summary.good_fraction
    return share * 100 if share is not None and row.summary.targets.is_set else None
