"""The first engine process, spawned before there is anybody to start it: it imports its libraries, for seconds, while
the server imports its own."""

import asyncio
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.core.errors import EngineUnavailableError
from engine.process.engine_process import EngineProcess
from engine.process.kv_memory import KVMemory

logger = logging.getLogger(__name__)

_STOPPED = EngineUnavailableError("The engine was stopped.")


@dataclass(frozen=True)
class FirstProcess:
    """A process that was spawned and not started, and the memory that it and the later ones use for KV."""

    process: EngineProcess
    kv_memory: KVMemory

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> "FirstProcess":
        """Raises OSError."""
        kv_memory = KVMemory()
        try:
            first = cls(EngineProcess(command, kv_memory.fd), kv_memory)
        except OSError:
            kv_memory.close()
            raise
        try:
            await first.process.spawn()
        except BaseException:
            await first.stop()
            raise
        return first

    async def stop(self) -> None:
        """Ends the process, whatever it does. Idempotent."""
        await self.process.stop(_STOPPED)
        self.kv_memory.close()


@contextmanager
def first_process(runner: asyncio.Runner, command: Sequence[str]) -> Generator[FirstProcess | None, None, None]:
    """Spawns a process on the loop of `runner`, and ends it with the context, whoever has used it. None stands for one
    that could not be spawned."""
    try:
        first = runner.run(FirstProcess.spawn(command))
    except OSError as error:
        logger.warning("no engine process could be spawned yet: %s", error)
        yield None
        return
    try:
        yield first
    finally:
        runner.run(first.stop())
