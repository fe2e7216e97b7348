"""Values, ratios and warnings of a comparison, and the tables that show them."""

import io
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.peers.comparison import Comparison, Run
from benchmarks.peers.plan import Plan, ServerPlan
from benchmarks.peers.report import print_report
from benchmarks.peers.summary import Section, sections, warnings
from benchmarks.peers.uneven import uneven
from loadtest.progress import NoProgress
from loadtest.record import Outcome, Record, Reply, Usage
from loadtest.results import RunResult
from loadtest.stats import Summary, Targets


def compared(**ttfts_s: tuple[float | None, ...]) -> Comparison:
    """Returns a comparison from a TTFT per server and round; None is a round in which the server had a problem."""
    servers = tuple(ServerPlan(name, "serve", scenarios=("S1",)) for name in ttfts_s)
    plan = Plan(servers, ("S1",), "ours", max(map(len, ttfts_s.values())), 600, 1, ())
    comparison = Comparison(plan, Path(), print, lambda: nullcontext(NoProgress()), lambda: None)
    for result in comparison.results:
        for number, ttft_s in enumerate(ttfts_s[result.plan.name]):
            problem = "it fell over" if ttft_s is None else ""
            result.runs.append(Run(number, "S1", problem, result=measured(ttft_s or 9.0), foreign_cpu_share=0.01))
    return comparison


def measured(ttft_s: float) -> RunResult:
    summary, failed = Summary(Targets()), Summary(Targets())
    reply = Reply(Outcome.OK, 0.0, ttft_s + 1, arrivals_s=[ttft_s, ttft_s + 1], usage=Usage(1, 2))
    summary.add(Record("all", 2, 0.0, reply))
    failed.add(Record("long", 2, 0.0, Reply(Outcome.BROKEN, 0.0, 1.0)))
    return RunResult({"all": summary, "long": failed}, 0.1, 1.0, 0)


def ttft(section: Section, name: str) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    value = section.servers[name]["TTFT p50 ms"]
    return value.per_round, value.ratio and value.ratio.per_round


def test_ratios_are_to_the_subject_wherever_it_stands_and_within_a_round() -> None:
    (section,) = sections(compared(theirs=(1.0, 4.0), ours=(2.0, 2.0)))
    assert ttft(section, "theirs") == ((1000.0, 4000.0), (0.5, 2.0))
    assert ttft(section, "ours") == ((2000.0, 2000.0), (1.0, 1.0))


def test_a_round_with_a_problem_is_in_no_value_and_keeps_the_others_paired() -> None:
    (section,) = sections(compared(ours=(None, 2.0, 4.0), theirs=(1.0, None, 2.0)))
    assert ttft(section, "ours") == ((2000.0, 4000.0), (1.0, 1.0))
    assert ttft(section, "theirs") == ((1000.0, 2000.0), (0.5,))


def test_without_the_subject_there_are_values_and_no_ratios() -> None:
    (section,) = sections(compared(ours=(None,), theirs=(1.0,)))
    assert list(section.servers) == ["theirs"]
    assert ttft(section, "theirs") == ((1000.0,), None)


def test_requests_that_all_failed_make_no_section() -> None:
    assert [section.group for section in sections(compared(ours=(1.0,)))] == ["all"]


@pytest.mark.parametrize(("share", "num"), [(0.05, 0), (0.051, 1), (None, 0)])
def test_more_than_a_little_foreign_cpu_is_warned_of(share: float | None, num: int) -> None:
    comparison = compared(ours=())
    comparison.results[0].runs.append(Run(0, "S1", foreign_cpu_share=share))
    assert len(list(warnings(comparison))) == num
    comparison = compared(ours=(1.0,))
    comparison.idle_foreign_cpu_share = share
    assert len(list(warnings(comparison))) == num


@pytest.mark.parametrize(("is_length_fixed", "num"), [(True, 0), (False, 1)])
def test_other_lengths_are_warned_of_where_the_load_test_does_not(is_length_fixed: bool, num: int) -> None:
    assert len(list(uneven({"all": answered(num_tokens=1)}, is_length_fixed))) == num
    assert list(uneven({"all": answered(num_tokens=2)}, is_length_fixed)) == []


def answered(num_tokens: int) -> Summary:
    summary = Summary(Targets())
    summary.add(Record("all", 2, 0.0, Reply(Outcome.OK, 0.0, 1.0, arrivals_s=[1.0], usage=Usage(1, num_tokens))))
    return summary


def test_tables_show_medians_ratios_ranges_and_problems() -> None:
    console = Console(file=io.StringIO(), width=140)
    print_report(console, compared(ours=(1.0, 1.0), theirs=(2.0, 3.0), third=(None, None)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "1,000",
        "2,500",
        "2.50 (2.00 to 3.00)",
        "it fell over",
        "1.0%",
        "2/2",
        "WARNING  third, S1, round 2",
    ):
        assert words in text
