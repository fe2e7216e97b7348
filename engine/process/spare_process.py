"""Another engine process that waits with its libraries imported, so that a restart costs loading and no imports."""

import asyncio
import logging
from collections.abc import Callable

from engine.core.errors import EngineUnavailableError
from engine.host.system_memory import system_available_bytes
from engine.process.engine_process import EngineProcess

logger = logging.getLogger(__name__)

_DELAY_S = 5.0
"""Before its imports begin, so that they take no time from the first requests."""
_MIN_AVAILABLE_BYTES = 1 << 30
"""Memory without which there is no spare process: it takes some 150 MB of it."""
_STOPPED = EngineUnavailableError("The engine was stopped.")


class NoSpareProcess:
    """Keeps no spare process: every restart starts one."""

    def prepare(self) -> None:
        pass

    async def take(self) -> EngineProcess | None:
        return None

    async def stop(self) -> None:
        pass


class SpareProcess:
    """Keeps at most one process, which was spawned and not started. All methods are for the event loop's thread."""

    def __init__(self, new_process: Callable[[], EngineProcess]) -> None:
        self._new_process = new_process
        self._process: EngineProcess | None = None
        self._spawning: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Has a process waiting from some seconds from now on, if there is the memory for it."""
        if self._spawning is None or self._spawning.done():
            self._spawning = asyncio.create_task(self._spawn())

    async def take(self) -> EngineProcess | None:
        """Returns the process that waits, to be started; None if there is none that lives."""
        process, self._process = self._process, None
        if process is not None and process.death is not None:
            await process.stop(_STOPPED)
            return None
        return process

    async def stop(self) -> None:
        """Ends the process that waits, and spawns no other. Idempotent."""
        if self._spawning is not None:
            self._spawning.cancel()
            await asyncio.wait((self._spawning,))
        if (process := await self.take()) is not None:
            await process.stop(_STOPPED)

    async def _spawn(self) -> None:
        await asyncio.sleep(_DELAY_S)
        if self._process is not None or system_available_bytes() < _MIN_AVAILABLE_BYTES:
            return
        try:
            process = self._new_process()
        except OSError as error:
            logger.warning("there is no spare engine process: %s", error)
            return
        try:
            await process.spawn()
        except BaseException as error:
            await process.stop(_STOPPED)
            if not isinstance(error, OSError):
                raise
            logger.warning("there is no spare engine process: %s", error)
            return
        self._process = process
