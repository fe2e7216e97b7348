"""Many clients at little cost: their load shares the machine's cores with the server that it measures.

Connections are kept, and of an answer only its status, two times and its last bytes are looked at; `loadtest` connects
for each request and parses each event.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

MAX_TAIL_BYTES = 2048
RETRY_S = 1.0
HEAD_END = b"\r\n\r\n"
STREAM_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of one request."""

    status: int
    """HTTP status; 0 if the connection was lost before the end of the response."""
    sent_s: float
    first_s: float
    """Time at which the response's first bytes came: with the first token, in a stream."""
    ended_s: float
    tail: bytes
    """The last bytes of a stream, or else the whole response."""


OnReply = Callable[["Client", Reply], None]


class Client(asyncio.Protocol):
    """One connection, which sends one request after the other."""

    def __init__(self, on_reply: OnReply, on_lost: Callable[["Client"], None]) -> None:
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._data: bytes | None = None  # of the answer that is awaited, its end only once the head is known
        self._sent_s = self._first_s = 0.0
        self._status = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def ask(self, message: bytes) -> None:
        self._data, self._status = b"", 0
        self._sent_s = time.perf_counter()
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        if self._data is None:
            return
        if not self._data:
            self._first_s = time.perf_counter()
        self._data += data
        if not self._status and HEAD_END in self._data:
            self._status = int(self._data[9:12])
        if self._status == 200:
            self._data = self._data[-MAX_TAIL_BYTES:]
        if self._is_complete(self._data):
            self._end(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        if self._data is not None:
            self._end(0)

    def _is_complete(self, data: bytes) -> bool:
        if self._status == 200:
            return data.endswith(STREAM_END)
        head, has_ended, body = data.partition(HEAD_END)
        length = _LENGTH.search(head + b"\r\n")
        return bool(has_ended) and length is not None and len(body) >= int(length[1])

    def _end(self, status: int) -> None:
        reply = Reply(status, self._sent_s, self._first_s, time.perf_counter(), self._data or b"")
        self._data = None
        self._on_reply(self, reply)


class Crowd:
    """A pool of clients, one for each request under way. A refused request is sent again before any new one."""

    def __init__(self, port: int, messages: Iterator[bytes]) -> None:
        self._port = port
        self._messages = messages
        self._refused = deque[bytes]()
        self._idle = dict[Client, None]()  # the longest idle first, so that none is idle until the server closes it
        self._asked = dict[Client, tuple[bytes, asyncio.Future[Reply]]]()
        self._opening = set[asyncio.Task[None]]()

    def ask(self) -> asyncio.Future[Reply]:
        message = self._refused.popleft() if self._refused else next(self._messages)
        reply = asyncio.get_running_loop().create_future()
        if self._idle:
            self._send(next(iter(self._idle)), message, reply)
        else:
            self._opening.add(task := asyncio.create_task(self._open(message, reply)))
            task.add_done_callback(self._opening.discard)
        return reply

    async def _open(self, message: bytes, reply: asyncio.Future[Reply]) -> None:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: Client(self._on_reply, self._on_lost), "127.0.0.1", self._port)
        self._send(client, message, reply)

    def _send(self, client: Client, message: bytes, reply: asyncio.Future[Reply]) -> None:
        self._idle.pop(client, None)
        self._asked[client] = message, reply
        client.ask(message)

    def _on_reply(self, client: Client, reply: Reply) -> None:
        message, future = self._asked.pop(client)
        if reply.status:
            self._idle[client] = None
        if reply.status == 429:
            self._refused.append(message)
        future.set_result(reply)

    def _on_lost(self, client: Client) -> None:
        self._idle.pop(client, None)


async def closed_loop(crowd: Crowd, num_clients: int, duration_s: float) -> list[Reply]:
    """Runs clients that send their next request when they have a response, and a while later when they were refused."""
    until_s = time.perf_counter() + duration_s
    replies: list[Reply] = []

    async def ask_on() -> None:
        while time.perf_counter() < until_s:
            replies.append(await crowd.ask())
            if replies[-1].status == 429:
                await asyncio.sleep(RETRY_S)

    await asyncio.gather(*(ask_on() for _ in range(num_clients)))
    return replies


async def open_loop(crowd: Crowd, offsets_s: Iterable[float], duration_s: float) -> list[Reply]:
    """Sends each request when it is due, whatever became of the others."""
    began_s = time.perf_counter()
    under_way: list[asyncio.Future[Reply]] = []
    for offset_s in offsets_s:
        if offset_s > duration_s:
            break
        if (left_s := began_s + offset_s - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
        under_way.append(crowd.ask())
    return await asyncio.gather(*under_way)
