"""One life of the engine process: its socket, its child process, how it got ready and how it ended."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import (
    AdapterError,
    ConfigError,
    EngineFailedError,
    ModelError,
    ModelMemoryError,
    TwostepError,
    UnsupportedModelError,
)
from engine.core.messages import EngineFailure, EngineReady, FromEngine, Shutdown, Start, ToEngine
from engine.process.child_process import ChildProcess
from engine.process.crash_marker import CrashMarker
from engine.process.poison_requests import Death
from engine.process.transport import BrokenLinkError, ServerLink

_STOP_GRACE_S = 3.0
_LAST_MESSAGE_S = 0.5  # how long after its end was noticed a process's last message may arrive
_START_ERRORS = {
    error.__name__: error for error in (ConfigError, ModelError, UnsupportedModelError, ModelMemoryError, AdapterError)
}


class EngineProcess:
    """One engine process, which starts once and ends once. Its socket is its own, so that no message of an earlier
    process can arrive here."""

    def __init__(self, command: Sequence[str], kv_memory_fd: int) -> None:
        """`command` starts the process, given the descriptors of its socket, of the marker and of the memory for its KV
        cache, `kv_memory_fd`, as last arguments. Raises OSError."""
        self._command = command
        self._kv_memory_fd = kv_memory_fd
        self._on_message: Callable[[FromEngine], None]  # from `start` on, as the next one
        self._on_death: Callable[[TwostepError], None]
        self._marker = CrashMarker.create()
        try:
            self._link = ServerLink(self._receive, self._on_broken_link)
        except OSError:
            self._marker.close()
            raise
        self._child: ChildProcess | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._is_closed = False
        self._was_killed_here = False
        self.death: TwostepError | None = None
        """Why the process ended; None while it lives."""

    async def spawn(self) -> None:
        """Have the process import its libraries and wait to be started. Raises OSError."""
        fds = (self._link.engine_end.fileno(), self._marker.fd, self._kv_memory_fd)
        command = [*self._command, *map(str, fds)]
        self._child = await ChildProcess.start(command, self._on_exit, pass_fds=fds)
        self._link.engine_end.close()

    async def start(
        self,
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[TwostepError], None],
    ) -> EngineInfo:
        """Start the process, which is spawned unless it was, and wait until the model is loaded.

        `on_death` is called once, with the reason, when the process ends or fails after it was ready, unless `stop` was
        called. Messages that it sent before may still arrive until `close`.

        Raises ConfigError or ModelError as the process reports them, EngineFailedError if it dies, and
        EngineUnavailableError if it is stopped meanwhile.
        """
        self._on_message, self._on_death = on_message, on_death
        if self._child is None:
            await self.spawn()
        else:
            self._child.wake()
        self.send(Start(config, logging.getLogger().getEffectiveLevel()))
        return await asyncio.shield(self._ready)

    @property
    def pid(self) -> int | None:
        """The process's number; None before it is spawned."""
        return None if self._child is None else self._child.pid

    def send(self, message: ToEngine) -> None:
        self._link.send(message)

    def kill(self, reason: TwostepError) -> None:
        """End the process at once, for this reason."""
        self._was_killed_here = True
        self._end(reason)
        if self._child is not None:
            self._child.kill()

    async def stop(self, reason: TwostepError) -> None:
        """End the process, whatever it does, without reporting a death, and close. Idempotent."""
        was_ready = self._is_ready
        self.death = self.death or reason
        if not self._ready.done():
            self._fail_to_start(reason)
        self.send(Shutdown())
        try:
            if self._child is not None and not was_ready:
                self._child.kill()  # while it loads the model it reads no message
            await self.reap()
        finally:
            self.close()

    async def reap(self) -> None:
        """Wait for the process to end by itself, then kill it, until nothing of it is left."""
        if self._child is not None:
            await self._child.stop(_STOP_GRACE_S)

    @property
    def may_have_damaged_memory(self) -> bool:
        """Whether the process ended by itself, and not killed: what made it crash may have written to the KV cache."""
        return self._child is not None and not self._child.may_have_been_killed

    def close(self) -> Death:
        """Receive the last messages and close the connection. Returns what is known of the death; the first call does,
        and later ones an empty Death."""
        if self._is_closed:
            return Death()
        self._is_closed = True
        computed = self._marker.read()
        self._marker.close()
        self._link.receive()
        self._link.close()
        was_killed = self._child is not None and self._child.may_have_been_killed
        return Death(computed, may_be_from_outside=was_killed and not self._was_killed_here)

    @property
    def _is_ready(self) -> bool:
        return self._ready.done() and self._ready.exception() is None

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady):
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, EngineFailure):
            error = _START_ERRORS.get(message.kind)
            self._end(error(message.message) if error else EngineFailedError(message.message, message.detail))
        else:
            self._on_message(message)

    def _on_broken_link(self, error: BrokenLinkError) -> None:
        self.kill(EngineFailedError(str(error)))

    def _on_exit(self) -> None:
        assert self._child is not None
        delay_s = 0.0 if self._child.was_killed else _LAST_MESSAGE_S
        asyncio.get_running_loop().call_later(delay_s, self._end_after_exit)

    def _end_after_exit(self) -> None:
        assert self._child is not None
        tail = self._child.output_tail
        last_line = f" Its last words: {tail.splitlines()[-1]}" if tail and not self._is_ready else ""
        doing = "unexpectedly" if self._is_ready else "while loading the model"
        message = f"The engine process ended {doing} ({self._child.how_it_ended}).{last_line}"
        self._end(EngineFailedError(message, tail))

    def _end(self, reason: TwostepError) -> None:
        """Record and report why the process ended; the first reason stands."""
        if self.death is not None:
            return
        self.death = reason
        if self._is_ready:
            self._on_death(reason)
        else:
            self._fail_to_start(reason)

    def _fail_to_start(self, reason: TwostepError) -> None:
        self._ready.set_exception(reason)
        self._ready.exception()  # counts as retrieved, should `start` no longer wait for it
