"""The flags of a sweep, and the flags of each of its points."""

import argparse
from argparse import Namespace
from collections.abc import Iterator

from loadtest.config import DEFAULT_NUM_REQUESTS, SweepKind
from loadtest.errors import UsageError
from loadtest.numbers import positive, positive_number
from loadtest.workload import WorkloadKind

_MAX_POINTS = 100
_REQUESTS_PER_STREAM = 4  # of a point, where nothing says how many

Points = tuple[SweepKind, tuple[float, ...]]


def add_sweep_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--sweep",
        type=_points,
        metavar="N,N,...",
        help="measure at each of these concurrencies, or, with rate: before them, at each of these requests per second",
    )
    add("--plot", metavar="FILE", help="draw the sweep as an SVG picture: TTFT, ITL and throughput against the load")


def points_of(flags: Namespace) -> Iterator[Namespace]:
    """Yields the flags of each point: those given, with its concurrency or rate.

    Raises UsageError for flags that do not go with a sweep.
    """
    kind, loads = flags.sweep
    if flags.rate is not None or (kind is SweepKind.CONCURRENCY and flags.concurrency is not None):
        raise UsageError(f"--sweep takes the place of --{'rate' if flags.rate is not None else 'concurrency'}")
    if flags.arrivals:
        raise UsageError("--sweep takes the place of the file's arrival times")
    if kind is SweepKind.RATE and flags.workload == WorkloadKind.AGENT_SESSIONS:
        raise UsageError("agent-sessions have no rate: --sweep takes their concurrencies")
    for load in loads:
        point = Namespace(**vars(flags))
        point.arrivals = False if flags.dataset else None
        if kind is SweepKind.RATE:
            point.rate = load
        else:
            point.concurrency = int(load)
            if _has_no_end(flags):
                point.requests = max(DEFAULT_NUM_REQUESTS, _REQUESTS_PER_STREAM * int(load))
        yield point


def _has_no_end(flags: Namespace) -> bool:
    is_plain = flags.workload in (None, WorkloadKind.RANDOM, WorkloadKind.SHARED_PREFIX) and not flags.dataset
    return is_plain and flags.scenario is None and flags.requests is None and flags.duration is None


def _points(text: str) -> Points:
    name, colon, values = text.rpartition(":")
    if colon and name not in tuple(SweepKind):
        raise argparse.ArgumentTypeError(f"{text!r} does not look like 1,2,4,8 or rate:0.5,1,2")
    kind = SweepKind(name) if colon else SweepKind.CONCURRENCY
    loads = tuple(
        (positive if kind is SweepKind.CONCURRENCY else positive_number)(value) for value in values.split(",")
    )
    if list(loads) != sorted(set(loads)) or not 2 <= len(loads) <= _MAX_POINTS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: at least 2 and at most {_MAX_POINTS} loads, each above the one before"
        )
    return kind, loads
