"""The wire format of streams, byte by byte."""

import asyncio
import re
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Send

from server.core.request_record import RequestRecord, attach_record
from server.generation.sse import DONE, KEEP_ALIVE, EventStream, event
from server.limits.write_timeout import WriteTimeout
from tests import virtual_time
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer

GOLDEN = Path(__file__).parents[1] / "golden"


def raw_stream(server: LiveServer, kind: str = "completion", **parameters: Any) -> bytes:
    """Returns the body's bytes, times and the backend's fingerprint replaced."""
    ask = server.chat if kind == "chat" else server.complete
    body = ask("Hi", stream=True, seed=1, headers={"X-Request-Id": "golden"}, **parameters).content
    return re.sub(rb'"created":\d+', b'"created":0', re.sub(rb"fp_[0-9a-f]{10}", b"fp_0", body))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("plain", {}),
        ("usage", {"stream_options": {"include_usage": True}}),
        ("logprobs", {"logprobs": 1, "echo": True, "return_token_ids": True}),
    ],
)
def test_the_bytes_of_a_stream_are_as_they_were(server: LiveServer, name: str, parameters: dict[str, Any]) -> None:
    """A difference is a change for every client: rewrite the golden file only when that is meant."""
    server.engine.rule = saying('a\u2028é\x85"\n')
    assert raw_stream(server, **parameters) == (GOLDEN / f"completion_{name}.sse").read_bytes()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("plain", {}),
        ("length", {"max_tokens": 3}),
        ("usage", {"stream_options": {"include_usage": True}}),
        ("continuous", {"stream_options": {"continuous_usage_stats": True}, "max_tokens": 2}),
        ("logprobs", {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "prompt_logprobs": 0}),
        ("continued", {"continue_final_message": True, "echo": True, "stop": ["é"]}),
        ("empty", {"stop_token_ids": [97]}),
    ],
)
def test_the_bytes_of_a_chat_stream_are_as_they_were(server: LiveServer, name: str, parameters: dict[str, Any]) -> None:
    server.engine.rule = saying('a\u2028é\x85"\n')
    assert raw_stream(server, "chat", **parameters) == (GOLDEN / f"chat_{name}.sse").read_bytes()


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_bytes_after_an_error_are_as_they_were(server: LiveServer, kind: str) -> None:
    server.engine.fail_at = 1
    assert raw_stream(server, kind) == (GOLDEN / f"{kind}_error.sse").read_bytes()


def test_streams_are_ascii_with_lf_and_nothing_but_data(server: LiveServer) -> None:
    """Some clients split lines at U+0085 and U+2028, some cannot take CRLF, ids or event names."""
    server.engine.rule = saying("\x85\u2028\u2029\r\n🙂")
    body = raw_stream(server)
    assert body.isascii() and b"\r" not in body
    lines = body.split(b"\n")
    assert all(line.startswith(b"data: ") for line in lines[0:-1:2]) and not any(lines[1::2])


def test_no_value_that_json_lacks_reaches_the_wire() -> None:
    with pytest.raises(ValueError):
        event({"x": float("nan")})


async def collect(events: list[bytes], pause_s: float, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns what an EventStream sends with a ping every 20 ms, where idle means 10 ms."""
    monkeypatch.setattr("server.generation.sse.PING_S", 0.02)
    monkeypatch.setattr("server.generation.sse.IDLE_S", 0.01)
    sent: list[bytes] = []

    async def source() -> AsyncGenerator[bytes, None]:
        for data in events:
            await asyncio.sleep(pause_s)
            yield data

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(message["body"])

    await respond(source(), send, stall_timeout_s=1)
    return sent


async def respond(stream: AsyncGenerator[bytes, None], send: Send, stall_timeout_s: float) -> None:
    """Runs an EventStream from its beginning to its end, and asserts that no timer is left."""
    scope: dict[str, Any] = {"type": "http", "method": "POST"}
    attach_record(scope, RequestRecord("id", 0.0))
    response = EventStream(stream, stream, {}, stall_timeout_s)
    await response(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    assert not any(isinstance(getattr(timer._callback, "__self__", None), WriteTimeout) for timer in timers)


def test_an_idle_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = asyncio.run(collect([b"x", DONE], 0.2, monkeypatch))
    assert KEEP_ALIVE in sent and [data for data in sent if data != KEEP_ALIVE] == [b"x", DONE]


def test_a_busy_stream_has_no_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "server.generation.sse.time", SimpleNamespace(monotonic=lambda: 0.0)
    )  # no time passes between tokens
    assert KEEP_ALIVE not in asyncio.run(collect([b"x"] * 5, 0.02, monkeypatch))


@pytest.mark.parametrize("pause_s", [0.5, 8.0, 13.5, 14.0])
def test_no_stream_is_silent_for_longer_than_is_promised(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are keep-alives sent more often than they must be."""
    sent_s: list[float] = []

    async def source() -> AsyncGenerator[bytes, None]:
        for silence_s in (0.0, pause_s, 100.0):
            await asyncio.sleep(silence_s)
            yield b"x"

    async def send(message: Message) -> None:
        if message.get("body"):
            sent_s.append(asyncio.get_running_loop().time())

    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("server.generation.sse.time", clock)
    virtual_time.run(respond(source(), send, stall_timeout_s=1))
    gaps_s = [later_s - sooner_s for sooner_s, later_s in pairwise(sent_s)]
    assert max(gaps_s) <= 15.1 and min(gaps_s[1:-1]) >= 13.9 and len(gaps_s) in (8, 9)


def test_a_stream_whose_client_takes_nothing_ends_with_its_source(caplog: pytest.LogCaptureFixture) -> None:
    is_closed = False

    async def source() -> AsyncGenerator[bytes, None]:
        nonlocal is_closed
        try:
            yield b"x"
        finally:
            is_closed = True

    async def send(message: Message) -> None:
        if message.get("body"):
            await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(respond(source(), send, stall_timeout_s=0.05), 20))
    assert is_closed and "the client stopped reading" in caplog.text


def test_a_stream_may_last_longer_than_one_send(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[bytes] = []

    async def source() -> AsyncGenerator[bytes, None]:
        for _ in range(5):
            await asyncio.sleep(0.04)
            yield b"x"

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    asyncio.run(respond(source(), send, stall_timeout_s=0.05))
    assert sent.count(b"x") == 5 and "stopped reading" not in caplog.text
