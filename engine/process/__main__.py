"""The engine process: `python -m engine.process LINK_FD MARKER_FD MEMORY_FD`, started by
`engine.process.engine_process`. It communicates by `engine.core.messages` only.

Its standard input is a pipe that ends when the server process does, however that dies; then this process ends, too,
even if it was stopped.
"""

import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from engine.core.adapters import AdapterInfo
from engine.core.cache_steering import CachedPrefixes
from engine.core.config import EngineConfig, EngineInfo
from engine.core.crash_marker import Marker
from engine.core.errors import AdapterError, ConfigError, ModelError, RequestError
from engine.core.messages import (
    AbortRequests,
    AdapterLoaded,
    AddRequest,
    DropPrefixes,
    EngineFailure,
    EngineReady,
    FindPrefix,
    FromEngine,
    Heartbeat,
    Inspect,
    Inspection,
    LoadAdapter,
    MarkStalled,
    PrefixFound,
    RequestRefused,
    RequestsScheduled,
    RequestState,
    ResetPrefixCache,
    Shutdown,
    Start,
    StepUpdate,
    ToEngine,
    UnloadAdapter,
)
from engine.host.log_format import configure_root
from engine.host.memory_trim import share_one_malloc_arena, trim_after_startup
from engine.host.openmp import shorten_spinning
from engine.host.parent_death import signal_when_parent_dies
from engine.process.crash_marker import CrashMarker
from engine.process.transport import EngineLink, ServerGoneError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
PARENT_GRACE_S = 5.0
EXIT_FAILED = 1
EXIT_CANNOT_START = 2


class Link(Protocol):
    """Messages from and to the server process."""

    def receive(self, timeout_s: float) -> list[ToEngine]: ...

    def has_arrived(self) -> bool: ...

    def send(self, message: FromEngine) -> None: ...


class SteppingEngine(Protocol):
    """`engine.engine.Engine`, or a fake of it."""

    info: EngineInfo

    @property
    def has_work(self) -> bool: ...

    def add_request(self, message: AddRequest) -> None: ...

    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    def set_stalled(self, request_id: str, is_stalled: bool) -> None: ...

    def inspect(self, request_ids: Iterable[str]) -> list[RequestState]: ...

    def find_prefix(self, message: FindPrefix) -> PrefixFound: ...

    def reset_prefix_cache(self, clears_store: bool) -> None: ...

    def drop_prefixes(self, tenant: str, key: str | None) -> None: ...

    def cached_prefixes(self, tenant: str) -> list[CachedPrefixes]: ...

    def load_adapter(self, path: str) -> AdapterInfo: ...

    def unload_adapter(self, digest: str) -> None: ...

    def step(self, on_scheduled: Callable[[list[str]], None]) -> StepUpdate: ...

    def rest(self, is_wanted: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


def ignore_signals() -> None:
    """Ignores the signals that service managers send to every process of a service. The server decides what they mean,
    and streams may end first: this process ends by a message, by the end of its standard input, or killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


Load = Callable[[EngineConfig, Marker, int], SteppingEngine]
"""Loads an engine from settings, given the crash marker and the descriptor of the memory for its KV cache."""


def main(arguments: list[str], load: Load) -> int:
    """Runs the engine process, and returns its exit code: 0 after Shutdown or the server's end, 2 if the engine cannot
    start as configured, else 1."""
    ignore_signals()
    threading.Thread(target=_end_after_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    link = EngineLink(int(arguments[0]))
    try:
        return run(link, load, CrashMarker(int(arguments[1])), int(arguments[2]))
    except ServerGoneError:
        logger.warning("the server process has ended; so does the engine")
        return 0
    finally:
        link.close()


def _end_after_parent(parent_fd: int) -> None:
    """Ends this process a while after its server, in case it does not notice that itself because it loads, computes for
    long, or hangs."""
    end = select.poll()
    end.register(parent_fd, select.POLLHUP)
    end.poll()
    time.sleep(PARENT_GRACE_S)
    os._exit(EXIT_FAILED)


def run(link: Link, load: Load, marker: Marker, kv_memory_fd: int) -> int:
    """Loads the engine and serves until Shutdown. Returns the exit code, after sending a failure if there was one;
    raises ServerGoneError only."""
    try:
        start = _wait_for_start(link)
        if start is None:
            return 0
        configure_root(start.log_level)
        engine = load(start.config, marker, kv_memory_fd)
        trim_after_startup()
        link.send(EngineReady(engine.info))
        try:
            _serve(engine, link, marker)
        finally:
            engine.close()
        return 0
    except (ConfigError, ModelError) as error:
        link.send(EngineFailure(type(error).__name__, str(error)))
        return EXIT_CANNOT_START
    except ServerGoneError:
        raise
    except Exception as error:
        logger.exception("the engine failed")
        message = f"The engine failed: {type(error).__name__}: {error}"
        link.send(EngineFailure(type(error).__name__, message, traceback.format_exc()))
        return EXIT_FAILED


def _wait_for_start(link: Link) -> Start | None:
    while True:
        for message in link.receive(HEARTBEAT_S):
            if isinstance(message, Start):
                return message
            if isinstance(message, Shutdown):
                return None


def _serve(engine: SteppingEngine, link: Link, marker: Marker) -> None:
    """Runs steps, and handles messages between them only. Waiting for a message takes no CPU time but for the
    heartbeat."""

    def report_scheduled(request_ids: list[str]) -> None:
        link.send(RequestsScheduled(request_ids))

    while True:
        messages = link.receive(0.0 if engine.has_work else HEARTBEAT_S)
        for message in messages:
            if isinstance(message, Shutdown):
                return
            _handle(message, engine, link, marker)
        if not messages and not engine.has_work:
            engine.rest(link.has_arrived)
        link.send(engine.step(report_scheduled) if engine.has_work else Heartbeat(time.monotonic()))


def _handle(message: ToEngine, engine: SteppingEngine, link: Link, marker: Marker) -> None:
    if isinstance(message, AddRequest):
        marker.mark((message.request_id,))
        _add(message, engine, link)
    elif isinstance(message, AbortRequests):
        engine.abort_requests(message.request_ids)
    elif isinstance(message, MarkStalled):
        engine.set_stalled(message.request_id, message.is_stalled)
    elif isinstance(message, Inspect):
        cached = {tenant: engine.cached_prefixes(tenant) for tenant in message.tenants}
        link.send(Inspection(engine.inspect(message.request_ids), cached))
    elif isinstance(message, FindPrefix):
        link.send(engine.find_prefix(message))
    elif isinstance(message, ResetPrefixCache):
        engine.reset_prefix_cache(message.clears_store)
    elif isinstance(message, DropPrefixes):
        engine.drop_prefixes(message.tenant, message.key)
    elif isinstance(message, LoadAdapter):
        link.send(_loaded(message.path, engine))
    elif isinstance(message, UnloadAdapter):
        engine.unload_adapter(message.digest)


def _add(message: AddRequest, engine: SteppingEngine, link: Link) -> None:
    try:
        engine.add_request(message)
    except RequestError as error:
        link.send(RequestRefused(message.request_id, str(error), error.param))


def _loaded(path: str, engine: SteppingEngine) -> AdapterLoaded:
    try:
        return AdapterLoaded(path, engine.load_adapter(path))
    except AdapterError as error:
        return AdapterLoaded(path, error=str(error))


if __name__ == "__main__":
    signal_when_parent_dies(signal.SIGCONT)  # so that a stopped process, too, notices and ends, with its KV written
    ignore_signals()  # before the seconds that the import takes
    share_one_malloc_arena()
    shorten_spinning()
    from engine.host.lean_torch import make_torch_lean

    make_torch_lean()  # torch enters the process only here
    from engine.assembly import import_libraries, load_engine

    import_libraries()  # a spare process waits with them
    sys.exit(main(sys.argv[1:], load_engine))
