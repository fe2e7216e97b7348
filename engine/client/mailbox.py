"""Items for one reader, in order: what `asyncio.Queue` does for many readers, and joins, takes three times the work."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """For the event loop's thread."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> T:
        """Waits for an item. One that came while the reader was cancelled is there for the next call."""
        while not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._items.popleft()
