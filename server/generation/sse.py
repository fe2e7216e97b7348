"""Server-sent events: their bytes, and the response that sends them and always closes their source."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from json import JSONEncoder
from typing import Any

import anyio
from sse_starlette.sse import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from server.core.chunked_json import json_slices
from server.core.request_record import RequestRecord, record_of
from server.limits.disconnect import disconnect, ended
from server.limits.write_timeout import WriteTimeout

logger = logging.getLogger("twostep.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream"
IDLE_S = 14.0
PING_S = 1.0  # between two checks for idleness: no stream is silent for longer than the sum of both

SLICE = 10  # entries of an iterator, which may have a hundred logprobs each

# ASCII only: some clients split lines at U+0085 and U+2028. Iterators are lists that are made when they are encoded.
_dumps = JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=list).encode


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {_dumps(data)}\n\n".encode("ascii")


def comment(data: Mapping[str, Any]) -> bytes:
    """Returns a line that clients of events do not see."""
    return f": {_dumps(data)}\n\n".encode("ascii")


def typed_event(data: Mapping[str, Any]) -> bytes:
    """Returns an event named by its type, for the APIs whose clients go by names."""
    return _typed(data["type"], _dumps(data))


async def chunked_typed_event(data: Mapping[str, Any]) -> bytes:
    """Returns the same bytes as `typed_event`; other tasks have their turns while the iterators in it are encoded."""
    return _typed(data["type"], await _chunked(data))


def _typed(kind: str, data: str) -> bytes:
    return f"event: {kind}\ndata: {data}\n\n".encode("ascii")


class EventHead:
    """The fields that all events of a stream begin with, encoded once."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._start = f'data: {_dumps(fields)[:-1]},"choices":'

    def event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return self._event(_dumps(choices), _dumps(extra))

    async def chunked_event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        """Returns the same bytes as `event`; other tasks have their turns while the iterators in it are encoded."""
        return self._event(f"[{','.join([await _chunked(choice) for choice in choices])}]", await _chunked(extra))

    def _event(self, choices: str, extra: str) -> bytes:
        end = "}" if extra == "{}" else f",{extra[1:]}"
        return f"{self._start}{choices}{end}\n\n".encode("ascii")


async def _chunked(value: Any) -> str:
    """Returns JSON, encoded in slices where objects or short lists contain iterators."""
    if isinstance(value, dict):
        return f"{{{','.join([f'{_dumps(name)}:{await _chunked(each)}' for name, each in value.items()])}}}"
    if isinstance(value, list) and len(value) <= SLICE:
        return f"[{','.join([await _chunked(each) for each in value])}]"
    if isinstance(value, Iterator):
        return f"[{','.join(await json_slices(value, SLICE, _dumps))}]"
    return _dumps(value)


class EventStream(EventSourceResponse):
    """Sends events until they end, the client leaves, or the client stops reading for `stall_timeout_s`.

    Whatever happens, `source`, which `events` reads from, is closed: it holds the engine's generations. The tasks are
    asyncio's, since each task that anyio cancels is a cycle that only the garbage collector frees.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Any, None],
        headers: Mapping[str, str],
        stall_timeout_s: float,
        keep_alive: bytes = KEEP_ALIVE,
        media_type: str = EVENT_STREAM,
    ) -> None:
        """`keep_alive` is sent while nothing else is, unless it is empty."""
        self._source = source
        self._stall_timeout_s = stall_timeout_s
        self._keep_alive = keep_alive
        self._last_sent_s = time.monotonic()
        super().__init__(events, headers={"Cache-Control": "no-cache", **headers}, media_type=media_type, sep="\n")
        del self.headers["Connection"]  # keep-alive or close is for the HTTP server to decide

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting_send(message: Message) -> None:
            self._last_sent_s = time.monotonic()
            watch.begin()
            try:
                await send(message)
            finally:
                watch.end()

        sending = asyncio.ensure_future(self._stream_response(noting_send))
        leaving = asyncio.ensure_future(disconnect(receive))
        stalling = asyncio.get_running_loop().create_future()
        watch = WriteTimeout(self._stall_timeout_s, stalling.cancel)
        tasks = sending, leaving, stalling, asyncio.ensure_future(self._ping(noting_send))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._note_end(record_of(scope), watch.has_stalled, leaving.done())
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            watch.stop()
            with anyio.CancelScope(shield=True):
                await ended(*tasks)
                await self._source.aclose()

    def _note_end(self, record: RequestRecord, has_stalled: bool, has_left: bool) -> None:
        """Notes why the stream ended. Servers report the end of a complete response like a client that left."""
        if has_stalled:
            logger.warning("request %s: the client stopped reading; its stream is ended", record.request_id)
        record.client_left = has_left and self.active and not has_stalled

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Sends without the library's timer for each message."""
        await send(message)

    async def _ping(self, send: Send) -> None:
        """Sends a keep-alive whenever the stream was idle."""
        while self._keep_alive:
            await asyncio.sleep(PING_S)
            async with self._send_lock:
                if self.active and time.monotonic() - self._last_sent_s >= IDLE_S:
                    await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
        await asyncio.Event().wait()
