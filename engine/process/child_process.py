"""A child process that cannot outlive this one unnoticed: its output is passed on, its end is reported."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

_TAIL_BYTES = 4096
_HINTS: dict[int, str] = {
    signal.SIGKILL: "; out of memory?",
    signal.SIGBUS: "; was a file that it reads cut short, or did a disk fail?",
}


class ChildProcess:
    """A running child. Its standard input is a pipe that ends when this process ends, by whatever cause."""

    def __init__(
        self, process: asyncio.subprocess.Process, output_fd: int, life_fd: int, on_exit: Callable[[], None]
    ) -> None:
        self._process = process
        self._output_fd: int | None = output_fd
        self._life_fd: int | None = life_fd
        self._tail = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(output_fd, False)
        self._loop.add_reader(output_fd, self._pass_output_on)
        self._exited = asyncio.create_task(self._wait(on_exit))

    @classmethod
    async def start(
        cls, command: Sequence[str], on_exit: Callable[[], None], pass_fds: Sequence[int] = ()
    ) -> "ChildProcess":
        """Starts the child. Both its output streams go, as they come, to this process's standard error. `pass_fds` keep
        their numbers."""
        life_read_fd, life_fd = os.pipe()
        output_fd, output_write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=life_read_fd,
                stdout=output_write_fd,
                stderr=output_write_fd,
                start_new_session=True,  # Ctrl-C goes to the terminal's whole group: this process decides what it means
                pass_fds=pass_fds,
            )
        except BaseException:
            os.close(life_fd)
            os.close(output_fd)
            raise
        finally:
            os.close(life_read_fd)
            os.close(output_write_fd)
        return cls(process, output_fd, life_fd, on_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the child: then it had no time for a last message."""
        return (self._process.returncode or 0) < 0

    @property
    def may_have_been_killed(self) -> bool:
        """Whether SIGKILL ended the child, which comes from outside: from a person, or from the kernel when memory runs
        out."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def how_it_ended(self) -> str:
        """How the child ended: `exit code 1`, `signal 11, Segmentation fault`, ..."""
        code = self._process.returncode
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit code {code}"
        return f"signal {-code}, {signal.strsignal(-code)}{_HINTS.get(-code, '')}"

    @property
    def output_tail(self) -> str:
        """The end of the child's output."""
        return self._tail.decode(errors="replace").strip()

    def wake(self) -> None:
        """Have the child go on, should a signal have stopped it while it waited."""
        if self.is_running:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the child and what it has started, such as a compiler."""
        if self.is_running:
            self._kill_group()

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for the child to end by itself, then kill it. Nothing of it is left. Idempotent."""
        try:
            await asyncio.wait((self._exited,), timeout=grace_s)
            self.kill()
            await asyncio.wait((self._exited,))
        finally:
            self.kill()  # when this was cancelled
            if self._life_fd is not None:
                os.close(self._life_fd)
                self._life_fd = None
            self._close_output()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _wait(self, on_exit: Callable[[], None]) -> None:
        await self._process.wait()
        self._kill_group()  # what it has started may live on
        self._pass_output_on()
        on_exit()

    def _pass_output_on(self) -> None:
        while self._output_fd is not None:
            try:
                data = os.read(self._output_fd, 65536)
            except BlockingIOError:
                return
            if not data:
                self._close_output()
                return
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            with contextlib.suppress(OSError, ValueError):  # standard error was closed
                sys.stderr.write(data.decode(errors="replace"))
                sys.stderr.flush()

    def _close_output(self) -> None:
        if self._output_fd is not None:
            self._loop.remove_reader(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = None
