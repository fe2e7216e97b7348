"""The report on the terminal: a table per scenario. Every number in it is in the JSON document, too."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.peers.comparison import Comparison, ServerResult
from benchmarks.peers.summary import Section, Value, sections, warnings

SHOWN = ("output tok/s", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms")


def print_report(console: Console, comparison: Comparison) -> None:
    """Prints the results so far: versions, a table per section, log tails and warnings."""
    for result in comparison.results:
        console.print(Text(f"{result.plan.name:20} {result.version or result.plan.skipped or 'version unknown'}"))
    found = sections(comparison)
    for section in found:
        console.print(_table(comparison, section))
    for scenario in comparison.plan.scenarios:  # a scenario without any result has no section
        if not any(section.scenario == scenario for section in found):
            console.print(_table(comparison, Section(scenario, "nothing measured", {})))
    for result in comparison.results:
        for words in dict.fromkeys(run.last_words for run in result.runs if run.last_words):
            console.print(Text(f"the last words of {result.plan.name}:\n{words}", style="dim"))
    for warning in warnings(comparison):
        console.print(Text(f"WARNING  {warning}", style="bold red"))


def _table(comparison: Comparison, section: Section) -> Table:
    plan = comparison.plan
    title = (
        f"{section.scenario}, {section.group}: median of the rounds; below it the ratio to {plan.subject} and its range"
    )
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("")
    for name in SHOWN:
        table.add_column(name, justify="right")
    table.add_column("ok/sent", justify="right")
    table.add_column("others' CPU, most", justify="right")
    for result in comparison.results:
        values = section.servers.get(result.plan.name, {})
        cells = (_cell(values.get(name), result.plan.name == plan.subject) for name in SHOWN)
        name, requests = _name(result, section.scenario), _requests(result, section.scenario, section.group)
        table.add_row(Text(name), *cells, requests, _foreign(result, section.scenario))
    return table


def _name(result: ServerResult, scenario: str) -> str:
    """Returns the server's name with its problems in the scenario."""
    plan = result.plan
    if plan.skipped:
        return f"{plan.name}\n{plan.skipped}"
    if scenario not in plan.scenarios:
        return f"{plan.name}\nnot asked for"
    problems = dict.fromkeys(run.problem for run in result.runs if run.scenario == scenario and run.problem)
    return "\n".join((plan.name, *problems))


def _cell(value: Value | None, is_subject: bool) -> str:
    if value is None:
        return "-"
    number = f"{value.median:,.0f}" if value.median >= 1000 else f"{value.median:.4g}"
    if value.ratio is None or is_subject:
        return number
    ratios = value.ratio.per_round
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{number}\n{value.ratio.median:.2f}{spread}"


def _requests(result: ServerResult, scenario: str, group: str) -> str:
    """Returns successful and sent requests of the runs that the table's numbers come from, as "ok/sent"."""
    runs = [run.result for run in result.runs if run.scenario == scenario and not run.problem and run.result]
    found = [run.groups[group] for run in runs if group in run.groups]
    return f"{sum(one.num_ok for one in found)}/{sum(one.num_requests for one in found)}" if found else "-"


def _foreign(result: ServerResult, scenario: str) -> str:
    shares = [run.foreign_cpu_share for run in result.runs if run.scenario == scenario]
    known = [share for share in shares if share is not None]
    return f"{max(known):.1%}" if known else "-"
