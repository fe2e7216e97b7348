"""`twostep trace`: every step of a trace is drawn, at its time and in its lane."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.core.stats import PoolStats, StepStats
from engine.scheduling.cost.step_trace import FileTracer
from twostep.cli import main
from twostep.commands.trace import TracedStep, events_of, steps_in

Event = dict[str, Any]


def share(request_id: str, start: int, end: int) -> ScheduledRequest:
    ids = list(range(start, end))
    return ScheduledRequest(request_id, ids, start, (), SamplingParams(), ids, [], samples=True)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace as an engine writes it: two steps, the second of which ended 0.75 s after the first."""
    path = tmp_path / "steps.jsonl"
    tracer, pool = FileTracer(str(path)), PoolStats(5, 2, 1)
    shares = [share("a/0", 0, 4), share("b/1", 2, 4)]
    tracer.record(Batch(Phase.PREFILL, tuple(shares)), stats(Phase.PREFILL, pool, 0.5, 10.0, predicted_s=0.25))
    tracer.record(Batch(Phase.DECODE, (share("b/1", 4, 5),)), stats(Phase.DECODE, pool, 0.25, 10.75))
    tracer.close()
    return path


def stats(phase: Phase, pool: PoolStats, duration_s: float, end_s: float, **more: Any) -> StepStats:
    return StepStats(phase, 2, 6, duration_s, 0.1, 3, 4, pool, 0, 0, 0, end_s=end_s, **more)


def timeline(capsys: pytest.CaptureFixture[str], path: Path) -> list[Event]:
    assert main(["trace", str(path)]) == 0
    events = json.loads(capsys.readouterr().out)
    assert isinstance(events, list)
    return events


def names_of(events: list[Event]) -> dict[tuple[int, int | None], str]:
    """Names of groups and lanes."""
    return {(each["pid"], each.get("tid")): each["args"]["name"] for each in events if each["ph"] == "M"}


def test_steps_and_requests_have_lanes(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    events = timeline(capsys, trace)
    names = names_of(events)
    drawn = [
        (names[each["pid"], None], names[each["pid"], each["tid"]], each["name"], each["dur"])
        for each in events
        if each["ph"] == "X"
    ]
    assert drawn == [
        ("steps", "prefill", "prefill", 5e5),
        ("requests", "a/0", "prefill", 5e5),
        ("requests", "b/1", "prefill", 5e5),
        ("steps", "decode", "decode", 2.5e5),
        ("requests", "b/1", "decode", 2.5e5),
    ]


def test_lanes_have_numbers_of_their_own(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    """Perfetto takes a lane's name for the newest lane of its number, whatever its group."""
    names = names_of(timeline(capsys, trace))
    groups, lanes = {pid for pid, _ in names}, [tid for _, tid in names if tid is not None]
    assert len(lanes) == 4 == len({*lanes} - groups)


def test_slices_of_a_lane_do_not_overlap_and_are_in_order(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    ends: dict[int, float] = {}
    for each in timeline(capsys, trace):
        if each["ph"] == "X":
            assert each["ts"] >= ends.get(each["tid"], 0.0)
            ends[each["tid"]] = each["ts"] + each["dur"]


def test_times_are_unix_times_by_the_clock_that_does_not_jump(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    first = json.loads(trace.read_text().splitlines()[0])
    prefill, decode = (each for each in timeline(capsys, trace) if each["ph"] == "X" and each["pid"] == 1)
    assert prefill["ts"] == pytest.approx((first["end_unix_s"] - 0.5) * 1e6, abs=1.0)
    assert decode["ts"] - prefill["ts"] == pytest.approx(1e6, abs=1.0)


def test_what_is_told_of_a_step_is_what_is_known(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    prefill, share_of_it, *_ = (each for each in timeline(capsys, trace) if each["ph"] == "X")
    numbers = {"num_requests": 2, "num_tokens": 6, "num_generated": 0}
    assert prefill["args"] == {**numbers, "model_s": 0.1, "drafting_s": 0.0, "predicted_s": 0.25}
    assert share_of_it["args"] == {"start": 0, "end": 4, "samples": True}


def test_requests_and_blocks_are_counted_when_steps_end(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    events = timeline(capsys, trace)
    counters = [each for each in events if each["ph"] == "C"]
    ends = [each["ts"] + each["dur"] for each in events if each["ph"] == "X" and each["pid"] == 1]
    assert [each["ts"] for each in counters] == pytest.approx([end for end in ends for _ in range(2)], abs=1.0)
    assert [each["args"] for each in counters[:2]] == [
        {"running": 3, "waiting": 4},
        {"free": 5, "held": 2, "cached": 1},
    ]


def test_a_machine_that_was_started_again_has_a_new_offset(trace: Path) -> None:
    before, _ = steps_in(trace.read_bytes().splitlines())
    after = msgspec.structs.replace(before, end_s=2.0, end_unix_s=before.end_unix_s + 100.0)
    assert isinstance(after, TracedStep)
    starts = [each["ts"] for each in events_of([before, after]) if each["ph"] == "X" and each["pid"] == 1]
    assert starts[1] - starts[0] == pytest.approx(100e6, abs=1.0)


def test_a_line_that_was_cut_off_is_left_out(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    whole = trace.read_bytes()
    events = timeline(capsys, trace)
    trace.write_bytes(whole[:100] + b"\n" + whole + whole[:100])
    assert timeline(capsys, trace) == events


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "has no steps"), (b"{}\n", "has no steps"), (None, "cannot be")]
)
def test_what_is_no_trace_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["trace", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"twostep: {path} {problem}")
