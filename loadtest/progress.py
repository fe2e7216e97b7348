"""Progress bar of a run, on stderr. It is updated once per request, never per token."""

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from loadtest.config import Schedule
from loadtest.record import Outcome, Record


class Progress(Protocol):
    """Receives the progress of a benchmark while it runs."""

    def begin(self, title: str, schedule: Schedule) -> None:
        """Called when a run begins."""

    def on_record(self, record: Record) -> None:
        """Called when a request has ended."""


class NoProgress:
    """Shows nothing."""

    def begin(self, title: str, schedule: Schedule) -> None: ...

    def on_record(self, record: Record) -> None: ...


class ProgressBar:
    """Shows a bar per run, by requests if their number is known, else by time. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[num_ended]} ended, {task.fields[num_failed]} failed"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,  # each refresh takes CPU from the server that is measured
        )
        self._task: TaskID | None = None
        self._schedule = Schedule()
        self._began_s = 0.0
        self._num_ended = self._num_failed = 0

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, title: str, schedule: Schedule) -> None:
        self._schedule = schedule
        self._began_s = time.perf_counter()
        self._num_ended = self._num_failed = 0
        total = schedule.num_requests or schedule.duration_s
        self._task = self._bar.add_task(title, total=total, num_ended=0, num_failed=0)

    def on_record(self, record: Record) -> None:
        if self._task is None:
            return
        self._num_ended += 1
        self._num_failed += record.reply.outcome is not Outcome.OK
        by_time = self._schedule.num_requests is None
        completed = time.perf_counter() - self._began_s if by_time else self._num_ended
        self._bar.update(self._task, completed=completed, num_ended=self._num_ended, num_failed=self._num_failed)
