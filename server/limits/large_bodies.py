"""Limits large request bodies: parsing and validating one blocks the event loop, and with it all streams.

Small bodies are not limited. Of the large ones a few are read at a time, the others wait unread in their sockets; and
they are parsed at a bounded rate, so that a flood of them makes a token of other clients late now and then, not every
one.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from starlette.datastructures import Headers

from engine.core.errors import OverloadedError

LARGE_BYTES = 64 * 1024
"""Size from which on a body is large."""
MAX_HELD = 16
"""Large bodies in memory at once."""
MAX_HELD_PER_CALLER = 4
"""Large bodies of one API key or address in memory at once: a client that sends slowly leaves slots for others."""
MAX_WAIT_S = 30.0
"""Seconds that a large body may wait for a slot."""
BYTES_PER_S = 4 * 2**20
"""Bytes of large bodies that are parsed per second, on average."""


def is_large(headers: Headers) -> bool:
    """Tells whether a body may be large: its declared length is, or it is chunked and has none."""
    length = headers.get("content-length", "")
    return int(length) >= LARGE_BYTES if length.isdecimal() else "transfer-encoding" in headers


class LargeBodies:
    """Slots for large bodies and their parsing rate, first come, first served. One per app, used on its event loop
    only."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._slots = asyncio.Semaphore(MAX_HELD)
        self._own_slots = WeakValueDictionary[str, asyncio.Semaphore]()  # by caller; only while it has or awaits some
        self._turn = asyncio.Lock()
        self._next_turn_s = 0.0

    @asynccontextmanager
    async def slot(self, caller: str) -> AsyncGenerator[None, None]:
        """Holds a slot for a body of which LARGE_BYTES have arrived, until it is parsed. Raises OverloadedError if none
        is free within MAX_WAIT_S."""
        own_slots = self._own_slots.setdefault(caller, asyncio.Semaphore(MAX_HELD_PER_CALLER))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await held.enter_async_context(own_slots)
                    await held.enter_async_context(self._slots)
            except TimeoutError:
                raise OverloadedError("Too many large bodies arrive at once; try again later.", MAX_WAIT_S) from None
            yield

    async def wait_to_parse(self, num_bytes: int) -> None:
        """Returns when `num_bytes` may be parsed, which the caller must do before it yields to the event loop."""
        async with self._turn:
            await self._sleep(max(0.0, self._next_turn_s - self._clock()))
            self._next_turn_s = self._clock() + num_bytes / BYTES_PER_S
