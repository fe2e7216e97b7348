"""The server's life: loading -> ready -> draining -> stopped, or failed. Holds the backend and counts the requests.

The port is open all the time; `middleware.gate` turns the state into 503.
"""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum

from engine.core.errors import EngineUnavailableError, TwostepError
from server.core.errors import NotReadyError
from server.metrics.metrics import Metrics
from server.runtime.backend import Backend, OpenBackend

logger = logging.getLogger("twostep.server")


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Lifecycle:
    """One per app, used on its event loop only."""

    def __init__(self, open_backend: OpenBackend, metrics: Metrics) -> None:
        self._open_backend = open_backend
        self._metrics = metrics
        self._backend: Backend | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._told_to_stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_under_way = 0
        """HTTP requests between their head and the last byte of their response."""
        self.state = State.LOADING
        self.failure: Exception | None = None
        """Why loading failed, or what the engine died of."""

    @property
    def backend(self) -> Backend:
        """Raises NotReadyError unless the model is loaded."""
        if self._backend is None:
            raise NotReadyError("The model is not loaded.")
        return self._backend

    def start(self) -> None:
        """Begin to load."""
        self._task = asyncio.create_task(self._hold_backend())

    async def settled(self) -> State:
        """Wait until loading has ended, well or not."""
        await self._settled.wait()
        return self.state

    async def drain(self, timeout_s: float) -> None:
        """Take no new work; return when the requests under way have ended, the time is over, or `hurry` is called."""
        self.state = State.DRAINING
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, self._told_to_stop)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def hurry(self) -> None:
        """Wait for no request any more."""
        self._told_to_stop.set()

    async def stop(self) -> None:
        """End the engine, and with it the requests that are left. May be called again."""
        self.hurry()
        if self._task is None:
            return
        if not self._settled.is_set():
            self._task.cancel()
        await asyncio.wait((self._task,))

    @contextmanager
    def request_under_way(self) -> Generator[None, None, None]:
        self.num_under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_under_way -= 1
            if self.num_under_way == 0:
                self._idle.set()

    async def _hold_backend(self) -> None:
        try:
            async with self._open_backend(self._metrics) as self._backend:
                engine = self._backend.engine
                self._metrics.on_engine_info(engine.info)
                self._metrics.watch_queue(lambda: engine.room)
                if self.state is State.LOADING:
                    self.state = State.READY
                self._settled.set()
                await self._told_to_stop.wait()
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
