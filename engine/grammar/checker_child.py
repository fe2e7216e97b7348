"""The child process that checks grammars, as the process that asks it has it."""

import contextlib
import json
import select
import signal
import subprocess
from collections.abc import Sequence
from typing import cast

from engine.core.errors import EngineUnavailableError, GrammarError

TOO_COMPLEX = "it is too complex to be compiled"
_START_S = 60.0


class CheckerChild:
    """Checks one grammar at a time in a process that is started before the first one, and again after a crash. Called
    by one thread at a time, but for `kill`."""

    def __init__(self, timeout_s: float, command: Sequence[str]) -> None:
        self._timeout_s = timeout_s
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Starts the process, so that the first grammar does not wait for that. Whether it cannot be is told by
        `fault_of`, which tries again."""
        with contextlib.suppress(EOFError, OSError):
            self._running()

    def fault_of(self, grammar: str) -> str | None:
        """Returns the grammar's fault, or None. Raises GrammarError if the process crashes, EngineUnavailableError if
        it does not start."""
        try:
            process = self._running()
        except (EOFError, OSError) as error:  # a timeout is an OSError
            raise EngineUnavailableError("The process that checks grammars cannot be started now.") from error
        try:
            print(json.dumps(grammar), file=process.stdin, flush=True)
            return _read_answer(process, self._timeout_s)
        except TimeoutError:
            self._end()
            return TOO_COMPLEX
        except (EOFError, BrokenPipeError):
            self._end()
            raise GrammarError(TOO_COMPLEX) from None

    def kill(self) -> None:
        """Ends a check under way, and keeps others from being started."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process. No check may be under way."""
        self.kill()
        self._end()

    def _running(self) -> subprocess.Popen[str]:
        """Returns the process, which is started unless it runs, and once more if it ends as it starts. Raises EOFError,
        OSError."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed from outside, which says nothing about the next grammar
        elif self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # nor does it if it was stopped
        try:
            return self._process or self._started()
        except EOFError:
            return self._started()

    def _started(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise EOFError
        pipe = subprocess.PIPE
        # Standard error would only show the compiler's last words in a crash.
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        try:
            _read_answer(self._process, _START_S)
        except BaseException:
            self._end()  # started late, it would answer each grammar with the result of the one before
            raise
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # it never read what was written
                    pipe.close()  # type: ignore[union-attr]


def _read_answer(child: subprocess.Popen[str], timeout_s: float) -> str | None:
    """Returns the child's next line, decoded; it writes each line in one piece. Raises TimeoutError or EOFError."""
    assert child.stdout is not None
    poll = select.poll()  # select() takes no descriptor from 1024 on
    poll.register(child.stdout, select.POLLIN)
    if not poll.poll(timeout_s * 1e3):
        raise TimeoutError
    line = child.stdout.readline()
    if not line:
        raise EOFError
    return cast("str | None", json.loads(line))
