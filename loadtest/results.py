"""Results of the measurement: per run, per target over all runs, and per group of requests."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from loadtest.client import Sender
from loadtest.errors import ServerGone
from loadtest.metrics import Snapshot
from loadtest.progress import Progress
from loadtest.record import Outcome, Record
from loadtest.server_view import ServerView
from loadtest.stats import Summary, Targets
from loadtest.target import Target
from loadtest.workload import RequestSpec

Key = TypeVar("Key", int, str)

_MAX_REFUSALS = 10  # connections in a row that failed before the run is given up


@dataclass(frozen=True)
class RunResult:
    """Result of one target in one round."""

    groups: Mapping[str, Summary]
    client_cpu_s: float  # of this process, inside the measured window
    wall_s: float
    num_interrupted: int  # requests cut by Ctrl-C or by a server that went away; not counted elsewhere
    turns: Mapping[int, Summary] = field(default_factory=dict)  # of agents' sessions, by the turn's number


class TargetResult:
    """Result of one target over all rounds so far."""

    def __init__(self, target: Target, model: str) -> None:
        self.target = target
        self.model = model
        self.rounds: list[RunResult] = []
        self.groups: dict[str, Summary] = {}  # of all rounds together
        self.turns: dict[int, Summary] = {}  # the same, of agents' sessions, by the turn's number
        self.server_view = ServerView()
        self.warmup_failures: list[str] = []

    def end_run(self, run: RunResult, before: Snapshot | None, after: Snapshot | None) -> None:
        """Adds a run; the snapshots are of the server's metrics before and after it."""
        self.rounds.append(run)
        for summaries in (run.groups, self.groups, run.turns, self.turns):
            _end_run(summaries.values())
        self.server_view.end_run(before, after, run.num_interrupted)


class RunSink:
    """Sends the requests of one run and adds their records to the summaries of the round and of all rounds."""

    def __init__(self, targets: Targets, result: TargetResult, send: Sender, progress: Progress) -> None:
        self.groups: dict[str, Summary] = {}
        self.turns: dict[int, Summary] = {}
        self.num_in_flight = 0
        self.gone: ServerGone | None = None
        self._targets = targets
        self._result = result
        self._send = send
        self._progress = progress
        self._num_refusals = 0

    async def send(self, spec: RequestSpec, due_s: float | None) -> Record:
        """Sends one request, adds its record and returns it. Raises ServerGone if the server has refused too many in a
        row."""
        self.num_in_flight += 1
        record = await self._send(spec, due_s)
        self.num_in_flight -= 1
        self._add(record)
        self._num_refusals = self._num_refusals + 1 if record.reply.outcome is Outcome.CONNECT_ERROR else 0
        if self._num_refusals >= _MAX_REFUSALS:
            why = f"{record.reply.message}, {_MAX_REFUSALS} times in a row"
            self.gone = ServerGone(f"{self._result.target.url} went away: {why}")
            raise self.gone
        return record

    def _add(self, record: Record) -> None:
        for groups in (self.groups, self._result.groups):
            self._add_to(groups, record.group, record)
        if record.turn is not None:
            for turns in (self.turns, self._result.turns):
                self._add_to(turns, record.turn, record)
        self._result.server_view.add(record)
        self._progress.on_record(record)

    def _add_to(self, summaries: dict[Key, Summary], key: Key, record: Record) -> None:
        if key not in summaries:
            summaries[key] = Summary(self._targets)
        summaries[key].add(record)


def _end_run(summaries: Iterable[Summary]) -> None:
    for summary in summaries:
        summary.end_run()
