"""The report on the console: tables and histograms. Every number here is in the JSON document too."""

from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.benchmark import Benchmark
from loadtest.compare import METRICS, SAMPLES, THROUGHPUT, Ratio, ratio
from loadtest.config import Config, Schedule
from loadtest.formats import format_number
from loadtest.histogram import histogram_lines
from loadtest.intervals import MIN_ROUNDS
from loadtest.record import Outcome
from loadtest.results import TargetResult
from loadtest.server_view import ServerView
from loadtest.sessions.report import print_turns
from loadtest.stats import Sample, Summary
from loadtest.workload import WorkloadKind

_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_HOW_TO_READ = (
    "ratios      of the same round: geometric mean [95 % confidence interval]; * where that excludes 1, "
    "as it does once in 20 for servers that are alike"
)
_TARGET_NAMES = {"ttft": "TTFT", "itl": "p99 of its ITL", "tpot": "TPOT", "e2e": "E2E"}
_PHASE_NAMES = {
    "queue_ms": "queue",
    "prefill_ms": "prefill",
    "ttft_ms": "TTFT",
    "itl_ms": "ITL, mean of a request",
    "decode_ms": "decode",
    "e2e_ms": "E2E",
}


def print_report(console: Console, benchmark: Benchmark, warnings: list[str]) -> None:
    """Prints what was measured so far."""
    results = [result for result in benchmark.results if result.rounds]
    _line(console, title_of(benchmark.config))
    if len(results) == 1:
        _print_one(console, results[0])
    elif results:
        _print_several(console, results)
    for result in results:
        _print_server_view(console, result)
    if benchmark.is_interrupted:
        num_cut = sum(run.num_interrupted for result in results for run in result.rounds)
        _line(console, f"Interrupted: these are the results so far. {num_cut} requests were cut.", "yellow")
    for warning in warnings:
        _line(console, f"WARNING  {warning}", "bold red")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def title_of(config: Config) -> str:
    """Returns what was measured, in a line."""
    name = config.scenario or (config.dataset.file if config.dataset else config.shape.kind)
    load = f"sweep of {config.sweep.kind}" if config.sweep else _load(config.schedule, config.shape.kind)
    return f"{name}: {load}, {_content(config)}, seed {config.seed}"


def _load(schedule: Schedule, kind: WorkloadKind) -> str:
    if kind is WorkloadKind.AGENT_SESSIONS:
        return f"{schedule.concurrency} sessions at once"
    if schedule.keeps_arrivals:
        return "arrivals of the file" + (f", {schedule.speedup:g} times as fast" if schedule.speedup != 1 else "")
    return f"{schedule.rate_per_s:g} requests/s" if schedule.rate_per_s else f"{schedule.concurrency} streams"


def _content(config: Config) -> str:
    shape, dataset = config.shape, config.dataset
    if dataset is not None:
        skipped = f" ({dataset.num_skipped} conversations without one were skipped)" if dataset.num_skipped else ""
        return f"{len(dataset.entries)} requests{skipped}"
    what = f"{shape.prompt_len}/{shape.output_len} prompt/output tokens"
    if shape.kind is WorkloadKind.SHARED_PREFIX:
        what += f", {shape.prefix_len} of the prompt shared"
    if shape.kind is WorkloadKind.AGENT_SESSIONS:
        what += f" a turn, {shape.num_turns} turns behind {shape.system_len} words and {shape.num_tools} tools"
        what += f", {config.schedule.think_s:g} s of thinking"
    if shape.kind is WorkloadKind.LONG_AMONG_DECODERS:
        what += f", {shape.long_prompt_len}/{shape.long_output_len} every {config.schedule.long_every_s:g} s"
    return what


def _print_one(console: Console, result: TargetResult) -> None:
    _line(console, f"{result.target.url}, model {result.model}")
    for name, summary in sorted(result.groups.items()):
        _print_latencies(console, name if len(result.groups) > 1 else "", summary)
        for title in ("TTFT", "ITL"):
            _print_histogram(console, title, SAMPLES[title](summary))
    print_turns(console, result)
    _print_client(console, result)


def _print_latencies(console: Console, group: str, summary: Summary) -> None:
    table = Table(title=group or None, title_justify="left")
    table.add_column("ms")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, sample_of in SAMPLES.items():
        _add_row(table, name, sample_of(summary))
    if table.row_count:
        console.print(table)
    rates = (f"{format_number(metric(summary))} {name}" for name, metric in THROUGHPUT.items())
    _line(console, f"throughput  {', '.join(rates)} over {summary.busy_s:.1f} s")
    _line(console, f"requests    {_counts(summary)}")
    if summary.cached_prompt_tokens:
        _line(console, f"cached      {summary.cached_prompt_tokens} of {summary.prompt_tokens} prompt tokens")
    if summary.num_retries:
        _line(console, f"retries     {summary.num_retries} after 429, {summary.retry_wait_s:.1f} s waited in all")
    if summary.targets.is_set:
        _line(console, f"goodput     {_goodput(summary)}")
    for message, count in summary.examples.items():
        _line(console, f"  {count} x {message}", "red")


def _counts(summary: Summary) -> str:
    counts = [f"{summary.num_ok} ok"]
    counts += [f"{summary.outcomes[end]} {end}" for end in Outcome if end is not Outcome.OK and summary.outcomes[end]]
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(summary.statuses.items()))
    return ", ".join(counts) + (f" (HTTP status: {statuses})" if statuses else "")


def _goodput(summary: Summary) -> str:
    limits = summary.targets.limits.items()
    each = ", ".join(f"{_TARGET_NAMES[name]} <= {limit:g} ms: {summary.met[name]}" for name, limit in limits)
    fraction, rate = (summary.good_fraction or 0.0) * 100, format_number(summary.per_second(summary.num_good))
    return f"{summary.num_good} of {summary.num_requests} ({fraction:.1f} %), {rate} requests/s ({each})"


def _print_histogram(console: Console, title: str, sample: Sample) -> None:
    if len(sample.values) > 1:
        _line(console, f"{title}, ms")
        for line in histogram_lines(sample.values):
            _line(console, f"  {line}")


def _print_several(console: Console, results: list[TargetResult]) -> None:
    for result in results:
        _line(console, f"{result.target.label}  {result.target.url}, model {result.model}")
    for group in sorted(results[0].groups):
        console.print(_comparison_table(group, results))
    if len(results[-1].rounds) >= MIN_ROUNDS:
        _line(console, _HOW_TO_READ)
    for result in results:
        print_turns(console, result)
        _print_client(console, result)


def _comparison_table(group: str, results: list[TargetResult]) -> Table:
    base, *others = results
    table = Table(title=group if len(base.groups) > 1 else None, title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.target.label, justify="right")
    for other in others:
        table.add_column(f"{other.target.label}/{base.target.label}", justify="right")
    for name, metric in METRICS.items():
        values = [format_number(metric(result.groups[group])) if group in result.groups else "-" for result in results]
        table.add_row(name, *values, *(_ratio(ratio(metric, group, base.rounds, other.rounds)) for other in others))
    for end in Outcome:
        counts = [result.groups[group].outcomes[end] if group in result.groups else 0 for result in results]
        if any(counts):
            table.add_row(str(end), *map(str, counts))
    if base.groups[group].targets.is_set:
        fractions = [result.groups[group].good_fraction if group in result.groups else None for result in results]
        table.add_row("goodput, fraction", *map(format_number, fractions))
    return table


def _ratio(found: Ratio | None) -> str:
    """Formats a ratio: its mean and confidence interval, with fewer rounds its median and their range."""
    if found is None:
        return "-"
    if found.interval is not None:
        low, high = found.interval
        return f"{found.mean:.3f} [{low:.3f} to {high:.3f}]{'*' if found.is_different else ' '}"
    spread = f" ({min(found.per_round):.3f} to {max(found.per_round):.3f})" if len(found.per_round) > 1 else ""
    return f"{found.median:.3f}{spread}"


def _print_client(console: Console, result: TargetResult) -> None:
    cpu_s, wall_s = (sum(values) for values in zip(*((r.client_cpu_s, r.wall_s) for r in result.rounds), strict=True))
    num_tokens = sum(summary.completion_tokens for summary in result.groups.values())
    per_token = f", {cpu_s / num_tokens * 1e6:.0f} us per output token" if num_tokens else ""
    share = f" ({cpu_s / wall_s * 100:.1f} % of one core{per_token})" if wall_s else ""
    _line(console, f"client      {result.target.label}: {cpu_s:.2f} s of CPU{share}")


def _print_server_view(console: Console, result: TargetResult) -> None:
    view = result.server_view
    if view.is_silent:
        return
    table = Table(title=f"{result.target.label}: the server's own view", title_justify="left")
    table.add_column("ms")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, sample in view.phases.items():
        _add_row(table, _PHASE_NAMES[name], sample)
    _add_row(table, "TTFT, client - server", view.ttft_beyond_server_ms)
    _add_row(table, "TPOT, client - server ITL", view.itl_beyond_server_ms)
    if table.row_count:
        console.print(table)
    for line in _counter_lines(view):
        _line(console, line)


def _counter_lines(view: ServerView) -> Iterable[str]:
    for name in ("prompt", "generation") if view.checks else ():
        advance = sum(asdict(check)[f"{name}_advance"] for check in view.checks)
        usage = sum(asdict(check)[f"{name}_usage"] for check in view.checks)
        yield f"{name} tokens: counter advanced by {advance}, usage adds up to {usage}"


def _add_row(table: Table, name: str, sample: Sample) -> None:
    """Adds the row of a sample, unless it is empty."""
    distribution = sample.distribution()
    if distribution is not None:
        table.add_row(name, *(format_number(asdict(distribution)[column]) for column in _COLUMNS))
