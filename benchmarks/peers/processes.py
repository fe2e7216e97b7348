"""Server processes: each is started on a free port, awaited, and ended with all processes that it started."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from benchmarks.peers.family import Member, family_of, is_running
from benchmarks.peers.plan import ServerPlan
from loadtest.discovery import find
from loadtest.errors import LoadTestError, Unreachable
from loadtest.target import parse_target

GRACE_S = 20.0  # from SIGTERM to SIGKILL
ORPHANS_GRACE_S = 1.0  # for processes that outlive the first one, to clean up after it
_POLL_S = 0.1
_LOG_TAIL = 2000  # bytes


class StartFailed(LoadTestError):
    """Raised when a server ended before it was ready, or was not ready in time."""


class ServerProcess:
    """A started server; its `url` answers once `wait_until_ready` has returned."""

    def __init__(self, plan: ServerPlan, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self.url = url
        self._plan = plan
        self._process = process
        self._log = log
        self._seen: set[Member] = set()  # also those whose parent has died, which no walk finds any more

    @property
    def family(self) -> set[Member]:
        """All processes of the server seen so far, also those that it started in sessions of their own.

        Once the first process and its session have ended, its pid may belong to a foreign process, which is not
        counted.
        """
        found = family_of(self._process.pid)
        if not (self.why_ended and any(member.pid == self._process.pid for member in found)):
            self._seen |= found
        return self._seen

    @property
    def why_ended(self) -> str:
        """How the server's first process ended; empty while it runs."""
        code = self._process.returncode
        if code is None:
            return ""
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def log_tail(self) -> str:
        """Returns the end of the server's log; empty if it cannot be read."""
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL))
            return file.read().decode(errors="replace").strip()
        return ""

    async def ended(self, timeout_s: float | None = None) -> None:
        """Waits until the server's first process has ended, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()

    async def wait_until_ready(self) -> None:
        """Waits until the server answers; raises StartFailed if it ends before, or takes too long."""
        ready = asyncio.create_task(find(parse_target("A", self.url), {}, self._plan.start_timeout_s))
        ended = asyncio.create_task(self.ended())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise StartFailed(f"did not start: {self.why_ended}")
            ready.result()
        except Unreachable as error:
            raise StartFailed(f"did not start: {error}") from None
        finally:
            ready.cancel()
            ended.cancel()

    async def stop(self) -> None:
        """Ends the server: SIGTERM, then SIGKILL to all processes left after a grace period.

        If this is cancelled while it waits, SIGKILL follows at once.
        """
        family = self.family
        self._signal_group(signal.SIGTERM)
        try:
            await self.ended(GRACE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(ORPHANS_GRACE_S):
                    while any(map(is_running, family)):
                        await asyncio.sleep(_POLL_S)
        finally:
            _kill(self.family)
            self._signal_group(signal.SIGKILL)
            await self.ended()

    def _signal_group(self, number: signal.Signals) -> None:
        """Signals the server's process group, unless its first process has ended: its pid may be reused then."""
        if not self.why_ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _kill(family: Iterable[Member]) -> None:
    for member in filter(is_running, family):
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _start(plan: ServerPlan, log: Path) -> ServerProcess:
    port = _free_port()
    try:
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *plan.arguments(port),
                env=plan.variables(port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches this program alone, which then ends the server
            )
    except OSError as error:
        raise StartFailed(f"did not start: {error}") from None
    return ServerProcess(plan, process, f"http://127.0.0.1:{port}", log)


@asynccontextmanager
async def running(plan: ServerPlan, log: Path) -> AsyncIterator[ServerProcess]:
    """Starts a server for the time of this context; on exit it is ended in any case.

    The server need not be ready yet. Raises StartFailed.
    """
    starting = asyncio.create_task(_start(plan, log))
    try:
        yield await asyncio.shield(starting)  # if this is cancelled, the server that starts is ended below
    finally:
        await asyncio.wait((starting,))
        if starting.exception() is None:
            await starting.result().stop()
