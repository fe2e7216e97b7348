"""Whether a grammar works, found out in a child process, so that the worst grammar costs that process and no more."""

import asyncio
import contextlib
import hashlib
import json
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast
from weakref import WeakValueDictionary

from engine.core.errors import GrammarError, OverloadedError

COMMAND = (sys.executable, "-m", "engine.grammar.checker_process")
MAX_ASKED = 16  # at once by one tenant: each may take the whole timeout, one after the other
_START_S = 60.0
_NUM_KEPT = 4096
_TOO_COMPLEX = "it is too complex to be compiled"
_FORGOTTEN_AFTER_S = 60.0  # a verdict of the clock, to which a busy machine may have come


@dataclass(slots=True)
class _Question:
    """A grammar whose fault is being found out, or will be."""

    task: asyncio.Task[None]
    tenant: str
    num_waiting: int = 0
    has_begun: bool = False


class GrammarChecker:
    """The child process starts with the first grammar, and again after one that it did not survive."""

    def __init__(self, timeout_s: float = 5.0, command: Sequence[str] = COMMAND) -> None:
        self._timeout_s = timeout_s
        self._command = command
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checker")  # one grammar at a time
        self._child: subprocess.Popen[str] | None = None
        self._faults: OrderedDict[bytes, str | None] = OrderedDict()  # by the grammar's hash, least recently used first
        self._turn = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = (
            WeakValueDictionary()
        )  # of tenants, who take theirs in turn
        self._asked: dict[bytes, _Question] = {}  # those whose fault is being found out

    async def check(self, grammar: str, tenant: str = "") -> None:
        """Raises GrammarError if the engine could not follow the grammar, OverloadedError if the tenant asks for too
        many. One that nobody waits for any more is not begun."""
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        if key not in self._faults:
            await self._verdict_on(key, self._asked.get(key) or self._begin(key, grammar, tenant))
        self._faults.move_to_end(key)
        if fault := self._faults[key]:
            raise GrammarError(fault)

    async def _verdict_on(self, key: bytes, question: "_Question") -> None:
        question.num_waiting += 1  # others may wait for the same
        try:
            await asyncio.shield(question.task)
        finally:
            question.num_waiting -= 1
            if not question.num_waiting and not question.has_begun:
                question.task.cancel()
                del self._asked[key]

    def _begin(self, key: bytes, grammar: str, tenant: str) -> "_Question":
        if sum(question.tenant == tenant for question in self._asked.values()) >= MAX_ASKED:
            raise OverloadedError("Too many new grammars are being checked; try again later.", self._timeout_s)
        question = self._asked[key] = _Question(asyncio.create_task(self._learn(key, grammar, tenant)), tenant)
        return question

    async def _learn(self, key: bytes, grammar: str, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        tenants_turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with tenants_turn, self._turn:
            self._asked[key].has_begun = True
            try:
                self._faults[key] = fault = await loop.run_in_executor(self._thread, self._ask, grammar)
            finally:
                del self._asked[key]
        if fault == _TOO_COMPLEX:
            loop.call_later(_FORGOTTEN_AFTER_S, self._faults.pop, key, None)
        if len(self._faults) > _NUM_KEPT:
            self._faults.popitem(last=False)

    def close(self) -> None:
        """End the child, whatever it does. Idempotent; no check may follow."""
        if self._child is not None:
            self._child.kill()  # a check under way ends with it
        self._thread.shutdown(cancel_futures=True)
        self._end_child()

    def _ask(self, grammar: str) -> str | None:
        """In the thread. The fault, or None; raises GrammarError when the child did not survive it."""
        child = self._running_child()
        try:
            print(json.dumps(grammar), file=child.stdin, flush=True)
            return _answer(child, self._timeout_s)
        except TimeoutError:
            self._end_child()
            return _TOO_COMPLEX
        except (EOFError, BrokenPipeError):
            self._end_child()
            raise GrammarError(_TOO_COMPLEX) from None

    def _running_child(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is not None:
            self._end_child()  # somebody else ended it, which says nothing about the next grammar
        if self._child is None:
            pipe = subprocess.PIPE
            # Standard error would only have what the compiler says on its way down.
            self._child = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            try:
                _answer(self._child, _START_S)
            except BaseException:
                self._end_child()  # were it ready later, it would answer each grammar with the word on the one before
                raise
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(BrokenPipeError):  # of what was written and never read
                    pipe.close()  # type: ignore[union-attr]


def _answer(child: subprocess.Popen[str], timeout_s: float) -> str | None:
    """The next line: the child writes each in one piece. Raises TimeoutError or EOFError."""
    assert child.stdout is not None
    poll = select.poll()  # select() takes no descriptor from 1024 on
    poll.register(child.stdout, select.POLLIN)
    if not poll.poll(timeout_s * 1e3):
        raise TimeoutError
    line = child.stdout.readline()
    if not line:
        raise EOFError
    return cast("str | None", json.loads(line))
