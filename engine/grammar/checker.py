"""Checks grammars of clients in child processes, so that the worst one costs such a process and no more."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from engine.core.errors import EngineUnavailableError, GrammarError, OverloadedError
from engine.grammar.checker_child import TOO_COMPLEX, CheckerChild
from engine.grammar.lark import Lark, Part, to_lark
from engine.host.python_module import module_command

COMMAND = module_command("engine.grammar.checker_process")
MAX_PENDING = 16  # checks of one tenant: each may take the whole timeout, one after the other
MAX_CHILDREN = 4  # tenants whose grammars are checked at once: a slow one holds up nobody else's
_MAX_CACHED = 4096
_TIMEOUT_TTL_S = 60.0  # a timeout is cached only this long: the machine may have been busy


@dataclass(slots=True)
class _PendingCheck:
    """A grammar that is being checked, or waits to be."""

    task: asyncio.Task[None]
    tenant: str
    num_waiting: int = 0
    """Callers that wait for the result."""
    is_running: bool = False


class Turns:
    """Turns of tenants at work of which so much is done at once: one thing of a tenant, then one of the next."""

    def __init__(self, num_at_once: int) -> None:
        self._places = asyncio.Semaphore(num_at_once)  # first come, first served
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None, None]:
        own = self._own.setdefault(tenant, asyncio.Lock())
        async with own, self._places:
            yield


class GrammarChecker:
    """Translates and checks grammars, one at a time of each tenant. A child process starts where a grammar finds none
    idle; the grammar is checked by the first that is. One that crashes starts again."""

    def __init__(
        self, timeout_s: float = 5.0, command: Sequence[str] = COMMAND, max_children: int = MAX_CHILDREN
    ) -> None:
        self._timeout_s = timeout_s
        self._children = [CheckerChild(timeout_s, command) for _ in range(max_children)]
        self._new = self._children[:]  # those that nobody has needed yet
        self._idle: asyncio.LifoQueue[CheckerChild] = asyncio.LifoQueue()
        self._threads = ThreadPoolExecutor(max_children, thread_name_prefix="grammar-checker")
        self._translator = ThreadPoolExecutor(1, thread_name_prefix="grammar-translator")
        self._translations = Turns(1)
        self._checks = Turns(max_children)
        self._faults: OrderedDict[bytes, str | None] = OrderedDict()  # by the grammar's hash, least recently used first
        self._pending: dict[bytes, _PendingCheck] = {}  # by the grammar's hash
        self._is_closed = False

    async def checked(self, source: Part | Lark, tenant: str = "") -> str:
        """Returns the grammar in Lark. Raises what `check` does."""
        loop = asyncio.get_running_loop()
        async with self._translations.turn(tenant):
            grammar, as_text = await loop.run_in_executor(self._translator, _translated, source)
        await self.check(as_text, tenant)
        return grammar

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
        async with self._checks.turn(tenant):
            child = await self._idle_child()
            self._pending[key].is_running = True
            try:
                self._faults[key] = fault = await loop.run_in_executor(self._threads, child.fault_of, grammar)
            finally:
                self._idle.put_nowait(child)
                del self._pending[key]
        if fault == TOO_COMPLEX:
            loop.call_later(_TIMEOUT_TTL_S, self._faults.pop, key, None)
        if len(self._faults) > _MAX_CACHED:
            self._faults.popitem(last=False)

    async def _idle_child(self) -> CheckerChild:
        """Returns the first child that is idle, which may be another than the one that is started for that."""
        if self._idle.empty() and self._new:
            started = self._new.pop()
            starting = asyncio.get_running_loop().run_in_executor(self._threads, started.start)
            starting.add_done_callback(lambda _: self._idle.put_nowait(started))
        child = await self._idle.get()
        if self._is_closed:
            self._idle.put_nowait(child)
            raise EngineUnavailableError("Grammars are not checked any more.")
        return child

    def close(self) -> None:
        """Kills the children, whatever they do. Idempotent; no check may follow."""
        self._is_closed = True
        for child in self._children:
            child.kill()  # a check under way ends with it
        for threads in (self._translator, self._threads):
            threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()


def _translated(source: Part | Lark) -> tuple[str, str]:
    """Returns the grammar for the model's vocabulary, and for any: these differ where there are special tokens."""
    grammar = to_lark(source)
    return grammar, to_lark(source, tokens_as_text=True) if "<[" in grammar else grammar
