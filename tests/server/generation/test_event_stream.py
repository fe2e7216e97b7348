"""How a response of events ends, whoever ends it."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Scope

from server.core.request_record import RequestRecord, attach_record
from server.generation.sse import EventStream


async def numbers(count: int, closed: list[str], name: str) -> AsyncGenerator[bytes, None]:
    try:
        for number in range(count):
            yield b"%d" % number
    finally:
        closed.append(name)


class Client:
    """Takes `num_taken` messages of a response, and leaves after message `leaves_at`."""

    def __init__(self, num_taken: int, leaves_at: int) -> None:
        self.messages: list[Message] = []
        self.closed: list[str] = []
        self.record = RequestRecord("r", 0.0)
        self._num_taken = num_taken
        self._leaves_at = leaves_at
        self._left = asyncio.Event()

    async def read(self, count: int, stall_timeout_s: float = 20.0) -> None:
        scope: Scope = {"type": "http", "method": "POST"}
        attach_record(scope, self.record)
        events, source = numbers(count, self.closed, "events"), numbers(1, self.closed, "source")
        await anext(source)
        stream = EventStream(events, source, {}, stall_timeout_s)
        await asyncio.wait_for(stream(scope, self._receive, self._send), 20)

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if len(self.messages) == self._num_taken:
            await asyncio.Event().wait()
        self.messages.append(message)
        if len(self.messages) == self._leaves_at:
            self._left.set()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("leaves_at", "has_left"), [(3, True), (5, False), (100, False)])
def test_it_ends_with_its_events_or_when_the_client_leaves(leaves_at: int, has_left: bool) -> None:
    async def check() -> None:
        client = Client(100, leaves_at)
        await client.read(3)
        assert len(client.messages) == min(leaves_at, 5)  # the head, three events and the end
        assert client.record.client_left is has_left
        assert sorted(client.closed) == ["events", "source"]

    asyncio.run(check())


def test_it_ends_when_the_client_reads_no_more() -> None:
    async def check() -> None:
        client = Client(2, 100)
        await client.read(3, stall_timeout_s=0.01)
        assert len(client.messages) == 2 and not client.record.client_left
        assert sorted(client.closed) == ["events", "source"]

    asyncio.run(check())


def test_a_failure_to_send_is_raised_and_what_it_reads_from_is_closed() -> None:
    async def check() -> None:
        client = Client(100, 100)

        async def send(message: Message) -> None:
            raise ZeroDivisionError

        client._send = send  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await client.read(3)
        assert client.closed[-1] == "source"

    asyncio.run(check())
