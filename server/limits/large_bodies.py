"""Large request bodies take turns: the event loop stands still while one is parsed and checked, and so do all streams.

Small bodies pass at once. Of the large ones a few are read at a time, the others wait unread in their sockets; and they
are parsed at a bounded rate, so that a flood of them costs other clients one late token now and then, not every one.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from starlette.datastructures import Headers

from engine.core.errors import OverloadedError

LARGE_BYTES = 64 * 1024
MAX_HELD = 16
"""Large bodies in memory at once."""
MAX_HELD_BY_ONE = 4
"""Of them, by one API key or address: who sends his slowly leaves places for others."""
MAX_WAIT_S = 30.0
"""For a place."""
BYTES_PER_S = 4 * 2**20
"""What is parsed of them per second, on average."""


def is_large(headers: Headers) -> bool:
    """Also a chunked body, whose length nobody tells."""
    length = headers.get("content-length", "")
    return int(length) >= LARGE_BYTES if length.isdecimal() else "transfer-encoding" in headers


class LargeBodies:
    """One per app, used on its event loop only. First come, first served."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._places = asyncio.Semaphore(MAX_HELD)
        self._own_places = WeakValueDictionary[str, asyncio.Semaphore]()  # of those who have some, or wait
        self._turn = asyncio.Lock()
        self._next_turn_s = 0.0

    @asynccontextmanager
    async def place(self, caller: str) -> AsyncGenerator[None, None]:
        """For a body of which LARGE_BYTES have come, until it is parsed. Raises OverloadedError after a while."""
        own_places = self._own_places.setdefault(caller, asyncio.Semaphore(MAX_HELD_BY_ONE))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await held.enter_async_context(own_places)
                    await held.enter_async_context(self._places)
            except TimeoutError:
                raise OverloadedError("Too many large bodies arrive at once; try again later.", MAX_WAIT_S) from None
            yield

    async def turn(self, num_bytes: int) -> None:
        """Returns when so many bytes may be parsed, then and there."""
        async with self._turn:
            await self._sleep(max(0.0, self._next_turn_s - self._clock()))
            self._next_turn_s = self._clock() + num_bytes / BYTES_PER_S
