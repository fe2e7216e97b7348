"""Large bodies wait for slots and parsing time; small ones do not."""

import asyncio
import json
from contextlib import AsyncExitStack, ExitStack

import pytest
from starlette.datastructures import Headers

from engine.core.errors import OverloadedError
from server.limits import large_bodies
from server.limits.large_bodies import BYTES_PER_S, LARGE_BYTES, MAX_HELD, MAX_HELD_PER_CALLER, LargeBodies, is_large
from tests.server.events import error_of
from tests.server.live_server import LiveServer

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
LARGE = json.dumps({"prompt": "Hi", "max_tokens": 1, "user": "x" * LARGE_BYTES}).encode()
NUM_CALLERS = MAX_HELD // MAX_HELD_PER_CALLER


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"content-length": str(LARGE_BYTES - 1)}, False),
        ({"content-length": str(LARGE_BYTES)}, True),
        ({"transfer-encoding": "chunked"}, True),
        ({}, False),
    ],
)
def test_the_head_decides_whether_a_body_is_large(headers: dict[str, str], expected: bool) -> None:
    assert is_large(Headers(headers)) is expected


def test_the_loop_rests_after_each_in_proportion_to_its_size() -> None:
    async def check() -> None:
        time = Time()
        bodies = LargeBodies(time.clock, time.sleep)
        await bodies.wait_to_parse(BYTES_PER_S // 2)
        assert time.now_s == 100.0
        await bodies.wait_to_parse(BYTES_PER_S)
        assert time.now_s == 100.5
        time.now_s = 101.0  # half of the pause is over
        await bodies.wait_to_parse(1)
        assert time.now_s == 101.5
        time.now_s = 200.0  # an idle time gives no credit
        await bodies.wait_to_parse(BYTES_PER_S)
        await bodies.wait_to_parse(1)
        assert time.now_s == 201.0

    asyncio.run(check())


def test_waiting_too_long_for_a_slot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "MAX_WAIT_S", 0.01)

    async def check() -> None:
        bodies = LargeBodies()
        async with AsyncExitStack() as stack:
            for number in range(MAX_HELD):
                await stack.enter_async_context(bodies.slot(f"caller {number % NUM_CALLERS}"))
            with pytest.raises(OverloadedError):
                await stack.enter_async_context(bodies.slot("late"))
        async with bodies.slot("late"):
            pass

    asyncio.run(check())


def test_one_caller_leaves_slots_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "MAX_WAIT_S", 0.01)

    async def check() -> None:
        bodies = LargeBodies()
        async with AsyncExitStack() as stack:
            for _ in range(MAX_HELD_PER_CALLER):
                await stack.enter_async_context(bodies.slot("greedy"))
            with pytest.raises(OverloadedError):
                await stack.enter_async_context(bodies.slot("greedy"))
            await stack.enter_async_context(bodies.slot("other"))
        async with bodies.slot("greedy"):
            pass

    asyncio.run(check())


def test_beyond_the_limit_large_bodies_wait_and_small_ones_do_not(server: LiveServer) -> None:
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGE)
    with ExitStack() as stack:
        held = [stack.enter_context(server.connect()) for _ in range(MAX_HELD_PER_CALLER)]
        for each in held:
            each.sendall(head + LARGE[:-1])
        server.wait_until(lambda: server.context.lifecycle.num_under_way == MAX_HELD_PER_CALLER)
        late = stack.enter_context(server.connect())
        late.sendall(head + LARGE)
        assert server.complete("Hi", max_tokens=1).status_code == 200
        other = stack.enter_context(server.connect("127.0.0.2"))
        other.sendall(head + LARGE)
        assert other.recv(12) == b"HTTP/1.1 200"
        late.settimeout(0.2)
        with pytest.raises(TimeoutError):
            late.recv(1)
        late.settimeout(20)
        held[0].sendall(LARGE[-1:])
        assert held[0].recv(12) == b"HTTP/1.1 200"
        assert late.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("headers", [{}, {"X-Forwarded-For": "10.1.2.3"}])
def test_a_body_without_a_slot_gets_429(
    server: LiveServer, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwarded addresses, which any client can write, do not count."""
    monkeypatch.setattr(large_bodies, "MAX_WAIT_S", 0.01)
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGE)
    with ExitStack() as stack:
        for _ in range(MAX_HELD_PER_CALLER):
            stack.enter_context(server.connect()).sendall(head + LARGE[:-1])
        server.wait_until(lambda: server.context.lifecycle.num_under_way == MAX_HELD_PER_CALLER)
        refused = server.post("/v1/completions", LARGE, headers)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "slow_down")


@pytest.mark.parametrize(
    "begun",
    [
        b"Content-Length: %d\r\n\r\n" % len(LARGE),
        b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE[: LARGE_BYTES - 1],
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
def test_the_beginning_of_a_body_takes_no_slot(server: LiveServer, begun: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(2 * MAX_HELD):
            stack.enter_context(server.connect()).sendall(HEAD + begun)
        server.wait_until(lambda: server.context.lifecycle.num_under_way == 2 * MAX_HELD)
        assert server.post("/v1/completions", LARGE).status_code == 200


def test_a_stream_does_not_keep_its_bodys_slot(server: LiveServer) -> None:
    server.engine.hold_at = 1
    head = HEAD + b"Content-Length: %d\r\n\r\n"
    body = json.dumps({"prompt": "Hi", "stream": True, "user": "x" * LARGE_BYTES}).encode()
    with ExitStack() as stack:
        for _ in range(MAX_HELD_PER_CALLER + 1):
            client = stack.enter_context(server.connect())
            client.sendall(head % len(body) + body)
            assert client.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("end", [b"", b"}"])
def test_bodies_that_fail_give_their_slot_back(server: LiveServer, end: bytes) -> None:
    body = b"[" + LARGE + end
    for _ in range(MAX_HELD_PER_CALLER + 1):
        assert server.post("/v1/completions", body).status_code == 400
