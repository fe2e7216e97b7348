"""The error rate limit: delays 4xx responses to a client that causes many. Refusing an invalid request costs about as
much as a small request, so a client that sends nothing else, as fast as it is refused, would take the whole server.

A burst of errors is answered at once. Beyond it each response is written when its turn comes, at a fixed rate, and a
client that is too far ahead of its turns gets 429 instead. The rate is per API key, or per address without one. Only a
response and its connection wait; the refused request itself has ended by then.
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
"""Burst: error responses to one client that are not delayed, after a quiet time."""
NUM_PER_S = 200
"""Error responses per second to one client, once the burst is used up."""
MAX_WAIT_S = 5.0
"""Longest delay of one response."""
MAX_WAITING = 2048
"""Delayed responses to all clients; two clients that flood have NUM_PER_S * MAX_WAIT_S each."""
MAX_KNOWN = 1024
"""API keys and addresses that are remembered, the most recent ones. A forgotten one has its burst again."""
_EXEMPT_STATUSES = frozenset({408, 429, 499})
"""Statuses that do not blame the request: it timed out, there was no room, or its client has gone."""


def is_rate_limited(status: int) -> bool:
    """Tells whether responses with this status count as errors of the client."""
    return 400 <= status < 500 and status not in _EXEMPT_STATUSES


class Verdict(Enum):
    """How the error rate limit treats an error response."""

    AT_ONCE = "at_once"
    LATE = "late"
    SLOW_DOWN = "slow_down"
    """The response is replaced by a 429, which is delayed."""
    CUT_OFF = "cut_off"
    """The connection is closed without a response: too many responses are waiting."""


class ErrorRateLimit:
    """Gives each client's error responses their turns. One per server, used on its event loop only."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`report` is called with the value of each verdict."""
        self._report = report
        self._clock = clock
        self._next_s: OrderedDict[str, float] = OrderedDict()  # by client: the turn of its next error, without a burst
        self._num_waiting = 0

    def reserve(self, client: str) -> float:
        """Takes the client's next turn and returns the seconds until then. A turn that is further away than MAX_WAIT_S
        is not taken."""
        now_s = self._clock()
        next_s = max(self._next_s.pop(client, -math.inf), now_s - (NUM_AT_ONCE - 1) / NUM_PER_S)
        wait_s = max(0.0, next_s - now_s)
        self._next_s[client] = next_s if wait_s > MAX_WAIT_S else next_s + 1 / NUM_PER_S
        if len(self._next_s) > MAX_KNOWN:
            self._next_s.popitem(last=False)
        return wait_s

    async def turn(self, client: str, released: asyncio.Event) -> Verdict:
        """Waits for the client's turn, or until `released`, and returns what becomes of the response. If `released` is
        set from the start, no turn is taken."""
        wait_s = 0.0 if released.is_set() else self.reserve(client)
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
    """Returns the error that replaces the ones of a client that causes too many."""
    return OverloadedError("Too many requests that cannot be served; correct them, and try again later.", MAX_WAIT_S)


def rate_limited(app: ASGIApp, await_turn: Callable[[str], Awaitable[Verdict]], cut_off: Callable[[], None]) -> ASGIApp:
    """Returns `app`, for one request, with its error response under the limit. `await_turn` gets the name of the
    request's API key, or "", and waits for the response's turn; `cut_off` closes the connection."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Message] = []

        async def holding_send(message: Message) -> None:
            if held or is_rate_limited(message.get("status", 200)):
                held.append(message)
            else:
                await send(message)

        await app(scope, receive, holding_send)
        if not held:
            return
        match await await_turn(record_of(scope).key.name):
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
    """Returns the CORS headers of a response: without them, browsers hide even the status from pages of other
    origins."""
    headers: Iterable[tuple[bytes, bytes]] = message["headers"]
    return [(name, value) for name, value in headers if name.startswith(b"access-control-") or name == b"vary"]
