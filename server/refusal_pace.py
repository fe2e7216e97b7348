"""Refusals have a pace: to refuse nonsense costs what a small request costs, and who sends nothing else, as fast as it
is refused, would have the server to himself.

A mistake is answered at once, and so is a crowd of them. Who goes on waits for each answer, which is not written before
its turn has come. What waits is an answer and its connection; the request that was refused is gone by then.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NUM_AT_ONCE = 128
"""Refusals without any wait, after a quiet time."""
NUM_PER_S = 200
"""Refusals on average, once these are used up."""
MAX_WAIT_S = 5.0
"""Of one answer; so NUM_PER_S times as many wait at most."""
_UNPACED = frozenset({408, 429, 499})
"""Those that blame no request: out of time, out of room, and nobody left to tell."""


def is_paced(status: int) -> bool:
    return 400 <= status < 500 and status not in _UNPACED


class RefusalPace:
    """One per server, used on its event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0  # the turn of the next one, if all came one by one

    def try_book(self) -> float | None:
        """Seconds to wait for a turn; None if too many wait. Who leaves does not give it back: his request was read."""
        now_s = self._clock()
        self._next_s = max(self._next_s, now_s - (NUM_AT_ONCE - 1) / NUM_PER_S)
        wait_s = max(0.0, self._next_s - now_s)
        if wait_s > MAX_WAIT_S:
            return None
        self._next_s += 1 / NUM_PER_S
        return wait_s


def paced(app: ASGIApp, pace: RefusalPace, left: asyncio.Event, cut_off: Callable[[], None]) -> ASGIApp:
    """`app` for one request. A refusal waits for `pace`, unless the client `left`; when too many wait, `cut_off` is
    called instead."""

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
        wait_s = pace.try_book()
        if wait_s is None:
            cut_off()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await left.wait()
        for message in held:
            await send(message)

    return run
