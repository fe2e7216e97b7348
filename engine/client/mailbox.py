"""A queue for one reader. `asyncio.Queue`, which serves many readers and joins, takes three times the work."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items for one reader, in order. All methods are for the event loop's thread."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    @property
    def oldest(self) -> T | None:
        """The item that is read next; None if all were read."""
        return self._items[0] if self._items else None

    async def get(self) -> T:
        """Waits for the next item and returns it. One that came while the reader was cancelled is there for the next
        call. Of items that wait for the reader, each leaves other tasks a turn: there may be thousands."""
        if self._items:
            await asyncio.sleep(0)
        while not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._items.popleft()
