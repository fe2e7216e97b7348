import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from loadtest.metrics import Snapshot, parse_snapshot, settled_snapshot
from loadtest.record import Outcome, Record, Reply, Usage
from loadtest.server_view import ServerView

IDLE = Snapshot(prompt_tokens=100, generation_tokens=50, num_running=0, num_waiting=0, num_held_blocks=0)

OURS = """\
# HELP twostep_prompt_tokens_total x
# TYPE twostep_prompt_tokens_total counter
twostep_prompt_tokens_total{model="a b"} 10.0
twostep_prompt_tokens_total{model="c"} 5.0 1700000000
twostep_prompt_tokens_created 1.7e+09
twostep_generation_tokens_total 1e3
twostep_requests_running 2.0
twostep_requests_waiting NaN
twostep_kv_blocks{state="free"} 9.0
twostep_kv_blocks{state="held"} 3.0
vllm:prompt_tokens_total 77.0
vllm:generation_tokens_total 77.0
"""


def record(
    outcome: Outcome = Outcome.OK, usage: Usage | None = None, reported: Mapping[str, float] | None = None
) -> Record:
    reply = Reply(outcome, 0.0, 1.0, arrivals_s=[0.1, 0.3], usage=usage, server_ms=reported or {})
    return Record("all", 2, 0.0, reply)


def view_of(*records: Record, prompt: int, generation: int, num_interrupted: int = 0) -> ServerView:
    view = ServerView()
    for each in records:
        view.add(each)
    after = replace(IDLE, prompt_tokens=100 + prompt, generation_tokens=50 + generation)
    view.end_run(IDLE, after, num_interrupted)
    return view


def test_counters_are_summed_over_labels_and_our_own_names_come_first() -> None:
    assert parse_snapshot(OURS) == Snapshot(15, 1000, num_running=2, num_waiting=0, num_held_blocks=3)


def test_another_servers_counters_are_read_too() -> None:
    text = "vllm:prompt_tokens_total 1\nvllm:generation_tokens_total 2\nvllm:num_requests_running 3\n"
    assert parse_snapshot(text) == Snapshot(1, 2, num_running=3)


@pytest.mark.parametrize("text", ["", "<html>", "twostep_prompt_tokens_total 1\n"])
def test_a_page_without_both_counters_is_no_snapshot(text: str) -> None:
    assert parse_snapshot(text) is None


def test_a_snapshot_is_taken_when_the_server_has_settled() -> None:
    busy = replace(IDLE, num_running=1)
    moving = replace(IDLE, generation_tokens=49)
    pages = iter([busy, busy, moving, IDLE, IDLE])

    async def read() -> Snapshot | None:
        return next(pages)

    assert asyncio.run(settled_snapshot(read)) == IDLE


def test_counters_that_advance_by_the_usage_are_fine() -> None:
    view = view_of(record(usage=Usage(3, 2)), record(usage=Usage(4, 5)), prompt=7, generation=7)
    assert view.problems == []
    assert not view.is_silent


@pytest.mark.parametrize(("prompt", "generation"), [(2, 2), (4, 2), (3, 1), (3, 3)])
def test_counters_that_advance_otherwise_are_a_problem(prompt: int, generation: int) -> None:
    (problem,) = view_of(record(usage=Usage(3, 2)), prompt=prompt, generation=generation).problems
    assert "usage adds up to" in problem


def test_a_request_without_usage_leaves_a_lower_bound() -> None:
    known, broken = record(usage=Usage(3, 2)), record(Outcome.BROKEN)
    assert view_of(known, broken, prompt=6, generation=9).problems == []
    assert view_of(known, prompt=6, generation=9, num_interrupted=1).problems == []
    assert len(view_of(known, broken, prompt=2, generation=1).problems) == 2


def test_a_request_that_failed_after_its_usage_counts_with_it() -> None:
    assert view_of(record(Outcome.BROKEN, usage=Usage(3, 2)), prompt=3, generation=2).problems == []
    assert len(view_of(record(Outcome.BROKEN, usage=Usage(3, 2)), prompt=4, generation=2).problems) == 1


def test_a_refused_request_leaves_the_check_exact() -> None:
    refused = [record(outcome) for outcome in (Outcome.REJECTED, Outcome.HTTP_ERROR, Outcome.CONNECT_ERROR)]
    assert len(view_of(record(usage=Usage(3, 2)), *refused, prompt=3, generation=3).problems) == 1


def test_each_run_is_checked_on_its_own() -> None:
    view = view_of(record(usage=Usage(3, 2)), prompt=3, generation=2)
    view.add(record(usage=Usage(1, 1)))
    view.end_run(IDLE, replace(IDLE, prompt_tokens=101, generation_tokens=51), 0)
    assert len(view.checks) == 2
    assert view.problems == []


def test_what_is_left_on_an_idle_server_is_a_problem() -> None:
    view = ServerView()
    view.end_run(IDLE, replace(IDLE, num_held_blocks=4, num_running=1), 0)
    assert view.problems == ["after the last request the server still shows 1 running, 4 held blocks"]


def test_a_server_without_metrics_and_timings_is_silent_and_fine() -> None:
    view = ServerView()
    view.add(record(usage=Usage(3, 2)))
    view.end_run(None, None, 0)
    assert view.is_silent
    assert view.problems == []


def test_the_servers_latencies_are_held_against_the_clients_per_request() -> None:
    view = ServerView()
    view.add(record(usage=Usage(3, 2), reported={"ttft_ms": 90.0, "itl_ms": 150.0, "queue_ms": 1.0}))
    ttft, itl = view.ttft_beyond_server_ms.distribution(), view.itl_beyond_server_ms.distribution()
    assert ttft is not None
    assert itl is not None
    assert ttft.mean == pytest.approx(10)
    assert itl.mean == pytest.approx(50)
    assert list(view.phases["queue_ms"].values) == [1.0]
    assert view.problems == []


def test_a_server_ttft_beyond_the_clients_is_impossible() -> None:
    view = ServerView()
    view.add(record(usage=Usage(3, 2), reported={"ttft_ms": 100.5}))
    assert view.problems == []
    view.add(record(usage=Usage(3, 2), reported={"ttft_ms": 102.0}))
    assert "1 requests" in view.problems[0]


def test_a_token_count_of_its_own_in_timings_is_a_problem() -> None:
    view = ServerView()
    view.add(record(usage=Usage(3, 2), reported={"generated_tokens": 2.0}))
    view.add(record(usage=Usage(3, 2), reported={"generated_tokens": 3.0}))
    assert "1 requests" in view.problems[0]
