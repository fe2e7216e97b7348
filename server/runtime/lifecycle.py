"""The server's lifecycle: loading -> ready -> draining -> stopped, or failed. It owns the backend and counts the
requests under way.

The port is open all the time; `middleware.gate` turns the state into 503.
"""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum

import anyio.lowlevel

from engine.core.errors import EngineUnavailableError, TwostepError
from server.core.errors import NotReadyError
from server.metrics.metrics import Metrics
from server.runtime.backend import Backend, OpenBackend
from server.runtime.garbage import collecting_while_idle

logger = logging.getLogger("twostep.server")


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Lifecycle:
    """State of one app. Used on its event loop only."""

    def __init__(self, open_backend: OpenBackend, metrics: Metrics) -> None:
        self._open_backend = open_backend
        self._metrics = metrics
        self._backend: Backend | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_under_way = 0
        """HTTP requests between their head and the last byte of their response."""
        self.state = State.LOADING
        self.failure: Exception | None = None
        """The error by which loading failed or the engine died."""

    @property
    def backend(self) -> Backend:
        """The loaded model. Raises NotReadyError unless it is loaded."""
        if self._backend is None:
            raise NotReadyError("The model is not loaded.")
        return self._backend

    def start(self) -> None:
        """Starts loading the model in a task."""
        self._task = asyncio.create_task(self._hold_backend())

    async def settled(self) -> State:
        """Waits until the model is loaded or has failed to load, and returns the state."""
        await self._settled.wait()
        return self.state

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work from now on. Returns when the requests under way have ended, the time is over, or
        `end_drain` is called."""
        self.state = State.DRAINING
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, self._stop_requested)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def end_drain(self) -> None:
        """Makes `drain` return without waiting for requests any longer."""
        self._stop_requested.set()

    async def stop(self) -> None:
        """Stops the engine, which ends the remaining requests. Idempotent."""
        self.end_drain()
        if self._task is None:
            return
        if not self._settled.is_set():
            self._task.cancel()
        await asyncio.wait((self._task,))

    @contextmanager
    def request_under_way(self) -> Generator[None, None, None]:
        """Counts a request for as long as the context lasts."""
        self.num_under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_under_way -= 1
            if self.num_under_way == 0:
                self._idle.set()

    async def _hold_backend(self) -> None:
        await anyio.lowlevel.checkpoint()  # imports anyio's backend, for which a first stream would wait
        try:
            async with self._open_backend(self._metrics) as self._backend:
                engine = self._backend.engine
                self._metrics.on_engine_info(engine.info)
                self._metrics.watch_queue(lambda: engine.queue_stats)
                if self.state is State.LOADING:
                    self.state = State.READY
                self._settled.set()
                with collecting_while_idle(lambda: self.num_under_way == 0):
                    await self._stop_requested.wait()
                self.state = State.STOPPED
                self._backend.engine.check_health()
        except EngineUnavailableError as error:
            self.failure, self.state = error, State.FAILED if self.state is State.LOADING else self.state
        except TwostepError as error:
            self.failure, self.state = error, State.FAILED
        except Exception as error:
            logger.exception("the engine could not be started or stopped")
            self.failure, self.state = error, State.FAILED
        finally:
            self._settled.set()
