"""Both ends of the connection between server and engine, or one end and the bytes that the other would write."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from engine.core.messages import FromEngine
from engine.process.transport import BrokenLinkError, EngineLink, ServerLink


def framed(data: bytes, number: int = 0) -> bytes:
    """Returns a message as it goes over the wire."""
    return number.to_bytes(8) + len(data).to_bytes(8) + data


@contextmanager
def engine_link() -> Generator[tuple[EngineLink, socket.socket], None, None]:
    """Yields the engine's end, and the socket that the server writes into."""
    server_end, engine_end = socket.socketpair()
    link = EngineLink(engine_end.detach())
    with server_end:
        yield link, server_end
    link.close()


@contextmanager
def linked(
    on_message: Callable[[FromEngine], None],
    on_broken: Callable[[BrokenLinkError], None] = pytest.fail,
) -> Generator[tuple[ServerLink, EngineLink], None, None]:
    """Yields both ends, on the running loop."""
    server = ServerLink(on_message, on_broken)
    engine = EngineLink(server.engine_end.detach())
    yield server, engine
    engine.close()
    server.close()


def on_both_loops(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a check on asyncio's own loop, and on the one that uvicorn takes where it is installed."""
    asyncio.run(asyncio.wait_for(check(), 30))
    uvloop.run(asyncio.wait_for(check(), 30))
