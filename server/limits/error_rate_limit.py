"""Refusals have a pace: to refuse nonsense costs what a small request costs, and who sends nothing else, as fast as it
is refused, would have the server to himself.

A mistake is answered at once, and so is a crowd of them. Who goes on waits for each answer, which is not written before
its turn has come, and who goes on faster than that is told to slow down. Each API key has its own pace, and without one
each address. What waits is an answer and its connection; the request that was refused is gone by then.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from enum import Enum

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.errors import OverloadedError
from server.core.errors import error_response
from server.core.request_record import id_headers, record_of

NUM_AT_ONCE = 128
"""Refusals without any wait, after a quiet time."""
NUM_PER_S = 200
"""Refusals on average, once these are used up."""
MAX_WAIT_S = 5.0
"""Of one answer."""
MAX_WAITING = 2048
"""Answers of all; so many wait when two floods of NUM_PER_S * MAX_WAIT_S do."""
MAX_KNOWN = 1024
"""Keys and addresses. Who is forgotten starts afresh."""
_UNPACED = frozenset({408, 429, 499})
"""Those that blame no request: out of time, out of room, and nobody left to tell."""


def is_paced(status: int) -> bool:
    return 400 <= status < 500 and status not in _UNPACED


class Verdict(Enum):
    """What becomes of an answer."""

    AT_ONCE = "at_once"
    LATE = "late"
    SLOW_DOWN = "slow_down"
    """It is told late, in place of the refusal."""
    CUT_OFF = "cut_off"
    """Nothing is told: too many answers wait."""


class ErrorRateLimit:
    """One per server, used on its event loop only."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`report` is told each verdict."""
        self._report = report
        self._clock = clock
        self._next_s: OrderedDict[str, float] = OrderedDict()  # the turn of each one's next, if all came one by one
        self._num_waiting = 0

    def book(self, who: str) -> float:
        """Seconds to wait for a turn. One that is too far away is not taken."""
        now_s = self._clock()
        next_s = max(self._next_s.pop(who, -math.inf), now_s - (NUM_AT_ONCE - 1) / NUM_PER_S)
        wait_s = max(0.0, next_s - now_s)
        self._next_s[who] = next_s if wait_s > MAX_WAIT_S else next_s + 1 / NUM_PER_S
        if len(self._next_s) > MAX_KNOWN:
            self._next_s.popitem(last=False)
        return wait_s

    async def turn(self, who: str, released: asyncio.Event) -> Verdict:
        """Wait for it, but no longer than until `released`. Who is released before takes none."""
        wait_s = 0.0 if released.is_set() else self.book(who)
        verdict = self._verdict(wait_s)
        self._report(verdict.value)
        if verdict in (Verdict.LATE, Verdict.SLOW_DOWN):
            self._num_waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
                        await released.wait()
            finally:
                self._num_waiting -= 1
        return verdict

    def _verdict(self, wait_s: float) -> Verdict:
        if wait_s == 0:
            return Verdict.AT_ONCE
        if self._num_waiting >= MAX_WAITING:
            return Verdict.CUT_OFF
        return Verdict.LATE if wait_s <= MAX_WAIT_S else Verdict.SLOW_DOWN


def slow_down() -> OverloadedError:
    return OverloadedError("Too many requests that cannot be served; correct them, and try again later.", MAX_WAIT_S)


def paced(app: ASGIApp, hold: Callable[[str], Awaitable[Verdict]], cut_off: Callable[[], None]) -> ASGIApp:
    """`app` for one request. `hold` is told the API key's name, if there is one, and waits for a refusal's turn."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Message] = []

        async def holding_send(message: Message) -> None:
            if held or is_paced(message.get("status", 200)):
                held.append(message)
            else:
                await send(message)

        await app(scope, receive, holding_send)
        if not held:
            return
        match await hold(record_of(scope).key.name):
            case Verdict.CUT_OFF:
                cut_off()
            case Verdict.SLOW_DOWN:
                response = error_response(scope, slow_down())
                response.headers["connection"] = "close"
                response.raw_headers += [*id_headers(scope), *_cors_headers(held[0])]
                await response(scope, receive, send)
            case _:
                for message in held:
                    await send(message)

    return run


def _cors_headers(message: Message) -> list[tuple[bytes, bytes]]:
    """Without these a page of another origin is not even told the status."""
    headers: Iterable[tuple[bytes, bytes]] = message["headers"]
    return [(name, value) for name, value in headers if name.startswith(b"access-control-") or name == b"vary"]
