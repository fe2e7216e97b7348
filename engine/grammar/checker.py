"""Checks grammars of clients in a child process, so that the worst one costs that process and no more."""

import asyncio
import contextlib
import hashlib
import json
import select
import subprocess
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast
from weakref import WeakValueDictionary

from engine.core.errors import EngineUnavailableError, GrammarError, OverloadedError
from engine.host.python_module import module_command

COMMAND = module_command("engine.grammar.checker_process")
MAX_PENDING = 16  # checks of one tenant: each may take the whole timeout, one after the other
_START_S = 60.0
_MAX_CACHED = 4096
_TOO_COMPLEX = "it is too complex to be compiled"
_TIMEOUT_TTL_S = 60.0  # a timeout is cached only this long: the machine may have been busy


@dataclass(slots=True)
class _PendingCheck:
    """A grammar that is being checked, or waits to be."""

    task: asyncio.Task[None]
    tenant: str
    num_waiting: int = 0
    """Callers that wait for the result."""
    is_running: bool = False


class GrammarChecker:
    """Checks grammars one at a time in a child process, which starts with the first grammar and restarts after a
    crash."""

    def __init__(self, timeout_s: float = 5.0, command: Sequence[str] = COMMAND) -> None:
        self._timeout_s = timeout_s
        self._command = command
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checker")  # one grammar at a time
        self._child: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._faults: OrderedDict[bytes, str | None] = OrderedDict()  # by the grammar's hash, least recently used first
        self._lock = asyncio.Lock()
        self._tenant_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # so that tenants take turns
        self._pending: dict[bytes, _PendingCheck] = {}  # by the grammar's hash

    async def check(self, grammar: str, tenant: str = "") -> None:
        """Raises GrammarError if the engine could not follow the grammar, OverloadedError if the tenant has too many
        checks pending, EngineUnavailableError if the child cannot be started. A check that no caller waits for any more
        is not started."""
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        if key not in self._faults:
            await self._wait_for(key, self._pending.get(key) or self._start(key, grammar, tenant))
        self._faults.move_to_end(key)
        if fault := self._faults[key]:
            raise GrammarError(fault)

    async def _wait_for(self, key: bytes, pending: _PendingCheck) -> None:
        pending.num_waiting += 1  # several callers may wait for the same grammar
        try:
            await asyncio.shield(pending.task)
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and not pending.is_running:
                pending.task.cancel()
                del self._pending[key]

    def _start(self, key: bytes, grammar: str, tenant: str) -> _PendingCheck:
        if sum(pending.tenant == tenant for pending in self._pending.values()) >= MAX_PENDING:
            raise OverloadedError("Too many new grammars are being checked; try again later.", self._timeout_s)
        pending = self._pending[key] = _PendingCheck(asyncio.create_task(self._run(key, grammar, tenant)), tenant)
        return pending

    async def _run(self, key: bytes, grammar: str, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        tenant_lock = self._tenant_locks.setdefault(tenant, asyncio.Lock())
        async with tenant_lock, self._lock:
            self._pending[key].is_running = True
            try:
                self._faults[key] = fault = await loop.run_in_executor(self._thread, self._run_in_child, grammar)
            finally:
                del self._pending[key]
        if fault == _TOO_COMPLEX:
            loop.call_later(_TIMEOUT_TTL_S, self._faults.pop, key, None)
        if len(self._faults) > _MAX_CACHED:
            self._faults.popitem(last=False)

    def close(self) -> None:
        """Kills the child, whatever it does. Idempotent; no check may follow."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()  # a check under way ends with it
        self._thread.shutdown(cancel_futures=True)
        self._kill_child()

    def _run_in_child(self, grammar: str) -> str | None:
        """Returns the grammar's fault, or None. Runs in the thread; raises GrammarError if the child crashes,
        EngineUnavailableError if it does not start."""
        try:
            child = self._running_child()
        except (EOFError, OSError) as error:  # a timeout is an OSError
            raise EngineUnavailableError("The process that checks grammars cannot be started now.") from error
        try:
            print(json.dumps(grammar), file=child.stdin, flush=True)
            return _read_answer(child, self._timeout_s)
        except TimeoutError:
            self._kill_child()
            return _TOO_COMPLEX
        except (EOFError, BrokenPipeError):
            self._kill_child()
            raise GrammarError(_TOO_COMPLEX) from None

    def _running_child(self) -> subprocess.Popen[str]:
        """Returns the child, which is started unless it runs, and once more if it ends as it starts. Raises EOFError,
        OSError."""
        if self._child is not None and self._child.poll() is not None:
            self._kill_child()  # it was killed from outside, which says nothing about the next grammar
        try:
            return self._child or self._started_child()
        except EOFError:
            return self._started_child()

    def _started_child(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise EOFError
        pipe = subprocess.PIPE
        # Standard error would only show the compiler's last words in a crash.
        self._child = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        try:
            _read_answer(self._child, _START_S)
        except BaseException:
            self._kill_child()  # started late, it would answer each grammar with the result of the one before
            raise
        return self._child

    def _kill_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(BrokenPipeError):  # the child never read what was written
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
