"""A step trace: one JSON line per step, off by default. `docs/latency.md` describes the fields."""

import contextlib
import logging
import time
from pathlib import Path
from typing import IO, Protocol

import msgspec

from engine.core.batch import Batch
from engine.core.errors import ConfigError
from engine.core.stats import StepStats

logger = logging.getLogger(__name__)


class Tracer(Protocol):
    def record(self, batch: Batch | None, stats: StepStats) -> None: ...

    def close(self) -> None: ...


class FileTracer:
    """Appends a line per step that ran something to a file, unbuffered: a killed engine's last step is there.

    A write that fails ends the trace, with a warning in the log, and never the engine.
    """

    def __init__(self, path: str) -> None:
        """Opens the file. Raises OSError."""
        self._path = path
        self._file: IO[bytes] | None = Path(path).open("ab", buffering=0)  # noqa: SIM115 - held for the life of the engine
        self._encoder = msgspec.json.Encoder()

    def record(self, batch: Batch | None, stats: StepStats) -> None:
        if self._file is None or batch is None:
            return
        requests = [(r.request_id, r.start, r.end, r.samples) for r in batch.requests]
        line = {"end_unix_s": time.time(), "requests": requests, **msgspec.structs.asdict(stats)}
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
        except OSError as error:
            logger.warning("the trace ends: %s cannot be written: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()


class NullTracer:
    """Traces nothing: the "off" state."""

    def record(self, batch: Batch | None, stats: StepStats) -> None:
        pass

    def close(self) -> None:
        pass


def check_trace_file(path: str) -> None:
    """Raises ConfigError unless a trace could be written there now."""
    try:
        FileTracer(path).close()
    except OSError as error:
        raise ConfigError(f"The trace file {path} cannot be written: {error.strerror}.") from error


def open_tracer(path: str | None) -> Tracer:
    """Returns a tracer that traces nothing if there is no path or it cannot be written: a restarted engine continues
    its streams, if not its trace."""
    if not path:
        return NullTracer()
    try:
        return FileTracer(path)
    except OSError as error:
        logger.warning("no trace: %s cannot be written: %s", path, error.strerror)
        return NullTracer()
