"""The smallest HTTP client that can leave at any stage: one request a connection, over asyncio's streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """How far a request gets before its client hangs up."""

    CONNECT = "after connecting"
    HEAD = "in the head"
    BODY = "in the body"
    SENT = "before an answer"
    BEGUN = "after the first bytes of the answer"
    SOME = "in the answer"
    END = "not at all"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def events(self) -> list[dict[str, Any]]:
        """Returns the events of a stream, which must be complete."""
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", ""), self.body[-200:]
        return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]


def request_bytes(body: bytes, path: str = "/v1/completions", key: str = "") -> tuple[bytes, bytes]:
    """Returns the request's head, with the API key if there is one, and its body."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort() if not reader.at_eof() else writer.close()


async def ask(port: int, body: dict[str, Any], leave: Stage = Stage.END) -> Answer | None:
    """Sends a request and returns the whole response; None if it hung up at `leave`, before that was complete."""
    head, content = request_bytes(json.dumps(body).encode())
    async with connected(port) as (reader, writer):
        if leave is Stage.CONNECT:
            return None
        cut = {Stage.HEAD: head[:40], Stage.BODY: head + content[: len(content) // 2]}
        writer.write(cut.get(leave, head + content))
        if leave in (Stage.HEAD, Stage.BODY, Stage.SENT):
            await writer.drain()
            await asyncio.sleep(0)
            return None
        if leave is Stage.BEGUN:
            await reader.read(1)
            return None
        if leave is Stage.SOME:
            await reader.read(2000)
            return None
        return parse_answer(await reader.read(-1))


def parse_answer(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    fields = head.lower()
    if b"transfer-encoding: chunked" in fields:
        body = _join_chunks(body)
    return Answer(int(head.split()[1]), body)


def _join_chunks(data: bytes) -> bytes:
    parts: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)
