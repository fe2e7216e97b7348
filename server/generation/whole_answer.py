"""The answer that is not streamed. A large one is written as it is made, in pieces, as fast as its reader takes them:
in one piece it would be in memory several times, and copying it would stop the event loop."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from server.core.request_record import record_of
from server.limits.write_timeout import WriteTimeout
from server.runtime.context import context_of, tenant_of

__all__ = ["answer_of", "reserve_memory"]

logger = logging.getLogger("twostep.server")

WHOLE_BYTES = 1 << 18
"""Answers up to this size are sent at once, with their length in a header."""
_SLICE = 10
"""Items of an iterator that are encoded at once: tokens, of which each may have a hundred log-probabilities."""


def reserve_memory(request: Request, num_bytes: int) -> None:
    """Reserves memory for the answer until it is written. Raises BadRequestError or OverloadedError where there is none
    for it."""
    memory = context_of(request).answer_memory.reserved(tenant_of(request), num_bytes)
    record_of(request.scope).held.enter_context(memory)


async def answer_of(
    body: Mapping[str, Any], headers: Mapping[str, str], stall_timeout_s: float, slice_size: int = _SLICE
) -> Response:
    """Returns the response with this JSON. Iterators in `body` are lists, whose items are made when they are written,
    `slice_size` at once; other tasks have their turns between two pieces."""
    pieces, first, num_bytes = json_pieces(body, slice_size), list[bytes](), 0
    for piece in pieces:
        first.append(piece)
        num_bytes += len(piece)
        if num_bytes > WHOLE_BYTES:
            return _PiecewiseResponse(chain(first, pieces), headers, stall_timeout_s)
        await asyncio.sleep(0)
    return Response(b"".join(first), media_type="application/json", headers=headers)


def json_pieces(value: Any, slice_size: int = _SLICE) -> Iterator[bytes]:
    """Yields the JSON of a value in pieces that take little time each: an object of a list, or `slice_size` items of an
    iterator."""
    parts = list[bytes]()
    for part in _parts(value, slice_size):
        if part is not _TURN:
            parts.append(part)
        elif parts:
            yield b"".join(parts)
            parts = []
    yield b"".join(parts)


_TURN = b""
"""Stands among the parts of JSON where a piece may end."""


def _parts(value: Any, slice_size: int) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        for index, (name, each) in enumerate(value.items()):
            yield (b"," if index else b"{") + msgspec.json.encode(name) + b":"
            yield from _parts(each, slice_size)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from _list(_parts(each, slice_size) for each in value)
    elif isinstance(value, Iterator):
        slices = iter(lambda: list(islice(value, slice_size)), [])
        yield from _list(iter((msgspec.json.encode(part)[1:-1],)) for part in slices)
    else:
        yield msgspec.json.encode(value)


def _list(items: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    """Yields a list of what the items consist of, which itself may be several items."""
    yield b"["
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
        yield _TURN
    yield b"]"


class _PiecewiseResponse(StreamingResponse):
    """Sends pieces until they end, the client leaves, or the client stops reading for `stall_timeout_s`."""

    def __init__(self, pieces: Iterable[bytes], headers: Mapping[str, str], stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        super().__init__(_in_turns(pieces), media_type="application/json", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def watched_send(message: Message) -> None:
            nonlocal is_whole
            watch.begin()
            try:
                await send(message)
            finally:
                watch.end()
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        answer = anyio.CancelScope()
        watch = WriteTimeout(self._stall_timeout_s, answer.cancel)
        try:
            with answer:
                await super().__call__(scope, receive, watched_send)
            record = record_of(scope)
            record.client_left = not is_whole and not watch.has_stalled
            if watch.has_stalled:
                logger.warning("request %s: the client stopped reading; its answer is cut off", record.request_id)
        finally:
            watch.stop()


async def _in_turns(pieces: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)  # sending waits only where the client is slower
