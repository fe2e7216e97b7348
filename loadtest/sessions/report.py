"""The table of agents' turns on the console."""

from rich.console import Console
from rich.table import Table

from loadtest.formats import format_number
from loadtest.results import TargetResult
from loadtest.stats import Summary

_COLUMNS = ("turn", "ok", "failed", "prompt tokens", "cached", "TTFT p50", "TTFT p90", "ITL p50", "E2E p50")


def print_turns(console: Console, result: TargetResult) -> None:
    """Prints a row per turn, if there were sessions: what a longer history costs, and how much of it was cached."""
    if not result.turns:
        return
    table = Table(title=f"{result.target.label}: turns of the sessions, in ms", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for number, summary in sorted(result.turns.items()):
        table.add_row(str(number), *_row(summary))
    console.print(table)


def _row(summary: Summary) -> list[str]:
    ttft, itl, e2e = (sample.distribution() for sample in (summary.ttft_ms, summary.itl_ms, summary.e2e_ms))
    num_prompt = summary.prompt_tokens
    return [
        str(summary.num_ok),
        str(summary.num_requests - summary.num_ok),
        format_number(num_prompt / summary.num_ok if summary.num_ok and num_prompt else None),
        f"{summary.cached_prompt_tokens / num_prompt:.0%}" if num_prompt else "-",
        format_number(ttft.p50 if ttft else None),
        format_number(ttft.p90 if ttft else None),
        format_number(itl.p50 if itl else None),
        format_number(e2e.p50 if e2e else None),
    ]
