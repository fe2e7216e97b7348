"""`twostep trace`: a step trace as Perfetto and Chrome draw it."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import ConfigError
from engine.core.stats import StepStats
from twostep.commands.arguments import CommandParser

__all__ = ["events_of", "main", "parser", "steps_in"]

Event = dict[str, Any]

_DESCRIPTION = """\
Turn a file that `twostep serve --trace FILE` wrote into a timeline, on standard output, for https://ui.perfetto.dev or
chrome://tracing: lanes of prefill and decode steps and of each request, and counters of requests and KV blocks."""
_EXAMPLES = """\
  twostep trace steps.jsonl > steps.json"""
# Groups of lanes are processes there, and lanes threads, which Perfetto names by their own numbers alone. One with the
# number of its group would be the main thread.
_STEPS, _REQUESTS = 1, 2
_LANES = {"prefill": 3, "decode": 4}
_FIRST_LANE = 5  # of requests
_TOLD = ("num_requests", "num_tokens", "num_generated", "model_s", "drafting_s", "predicted_s", "floor_s", "bound")
_CLOCK_JUMP_S = 1.0


class TracedStep(StepStats, frozen=True, kw_only=True):
    """A line of a trace: see docs/latency.md."""

    end_unix_s: float
    requests: list[tuple[str, int, int, bool]]
    """Each request's id, the positions [start, end) that were computed, and whether it got a token."""


def parser() -> CommandParser:
    made = CommandParser("trace", _DESCRIPTION, _EXAMPLES)
    made.add_argument("file", metavar="FILE", type=Path, help="what serve --trace wrote")
    return made


def main(arguments: Sequence[str]) -> int:
    """Prints the timeline. Raises ConfigError for a file that is none or cannot be read."""
    path = parser().parse(arguments).file
    try:
        with path.open("rb") as lines:
            events = events_of(steps_in(lines))
            first = next(events, None)
            if first is None:
                raise ConfigError(f"{path} has no steps: give a file that twostep serve --trace FILE wrote.")
            sys.stdout.write(f"[{json.dumps(first)}")
            for event in events:
                sys.stdout.write(f",\n{json.dumps(event)}")
            print("]")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    return 0


def steps_in(lines: Iterable[bytes]) -> Iterator[TracedStep]:
    """Yields the steps of a trace's lines. Those that are no steps are left out: an engine that was killed may have
    written a part of its last one."""
    decoder = msgspec.json.Decoder(TracedStep)
    for line in lines:
        try:
            step = decoder.decode(line)
        except msgspec.MsgspecError:
            continue
        if step.phase is not None:
            yield step


def events_of(steps: Iterable[TracedStep]) -> Iterator[Event]:
    """Yields the timeline as events of the Trace Event Format. Times are Unix times; from one step to the next they go
    by the clock that does not jump."""
    offset_s: float | None = None
    lanes: dict[str, int] = {}
    for step in steps:
        seen_s = step.end_unix_s - step.end_s
        if offset_s is None:
            yield from _names()
        if offset_s is None or abs(seen_s - offset_s) > _CLOCK_JUMP_S:
            offset_s = seen_s  # the first step, or the machine was started again, or its clock set
        end_us = _us(step.end_s + offset_s)
        time = {"ts": _us(step.end_s + offset_s - step.duration_s), "dur": _us(step.duration_s)}
        assert step.phase is not None
        args = {name: value for name in _TOLD if (value := getattr(step, name)) is not None}
        yield {"ph": "X", "pid": _STEPS, "tid": _LANES[step.phase], "name": step.phase.value, **time, "args": args}
        for request_id, start, end, samples in step.requests:
            if request_id not in lanes:
                lanes[request_id] = len(lanes) + _FIRST_LANE
                yield _name(_REQUESTS, request_id, lanes[request_id])
            args = {"start": start, "end": end, "samples": samples}
            lane = {"pid": _REQUESTS, "tid": lanes[request_id]}
            yield {"ph": "X", **lane, "name": step.phase.value, **time, "args": args}
        yield _counter("requests", end_us, {"running": step.num_running, "waiting": step.num_waiting})
        yield _counter("KV blocks", end_us, msgspec.structs.asdict(step.pool))


def _names() -> Iterator[Event]:
    """Yields the names of the groups and of the lanes of steps."""
    yield _name(_STEPS, "steps")
    yield _name(_REQUESTS, "requests")
    for name, lane in _LANES.items():
        yield _name(_STEPS, name, lane)


def _name(group: int, name: str, lane: int | None = None) -> Event:
    kind = {"name": "process_name"} if lane is None else {"name": "thread_name", "tid": lane}
    return {"ph": "M", "pid": group, **kind, "args": {"name": name}}


def _counter(name: str, time_us: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "pid": _STEPS, "name": name, "ts": time_us, "args": values}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
