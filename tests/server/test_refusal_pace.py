"""Refusals wait for their turn when there are many; nothing else does, and nobody waits for who left."""

from contextlib import closing

import pytest

from server.refusal_pace import MAX_WAIT_S, NUM_AT_ONCE, NUM_PER_S, RefusalPace, is_paced
from tests.server.live_server import LiveServer, live_server

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
NOT_JSON = HEAD + b"Content-Length: 1\r\n\r\n{"
NOT_HTTP = b"\0\r\n\r\n"
UNREAD = HEAD + b"Content-Length: 99999999\r\n\r\n"
NO_ROUTE = b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
REFUSED = pytest.mark.parametrize(
    "data", [NOT_JSON, NOT_HTTP, UNREAD, NO_ROUTE], ids=["json", "http", "unread", "route"]
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def waits(pace: RefusalPace, count: int) -> list[float | None]:
    return [pace.try_book() for _ in range(count)]


def used_up(clock: Clock) -> RefusalPace:
    pace = RefusalPace(clock)
    assert waits(pace, NUM_AT_ONCE) == [0.0] * NUM_AT_ONCE
    return pace


class TestTurns:
    def test_a_crowd_has_none_and_who_comes_then_waits_for_all_before(self) -> None:
        pace = used_up(Clock())
        assert waits(pace, 3) == pytest.approx([1 / NUM_PER_S, 2 / NUM_PER_S, 3 / NUM_PER_S], abs=1e-6)

    def test_those_that_come_no_faster_than_the_rate_never_wait(self) -> None:
        clock = Clock()
        pace = used_up(clock)
        for _ in range(1000):
            clock.now_s += 1.001 / NUM_PER_S
            assert pace.try_book() == 0.0

    def test_credit_comes_back_with_time_and_no_more_than_a_crowds(self) -> None:
        clock = Clock()
        pace = used_up(clock)
        clock.now_s += 10.001 / NUM_PER_S
        assert waits(pace, 11)[9:] == pytest.approx([0.0, 0.999 / NUM_PER_S], abs=1e-6)
        clock.now_s += 1000
        assert waits(pace, NUM_AT_ONCE + 1)[NUM_AT_ONCE - 1 :] == pytest.approx([0.0, 1 / NUM_PER_S], abs=1e-6)

    def test_no_more_wait_than_have_a_turn_in_time_and_those_cost_no_turn(self) -> None:
        clock = Clock()
        pace = used_up(clock)
        told = [wait_s for wait_s in waits(pace, 2 * int(MAX_WAIT_S * NUM_PER_S)) if wait_s is not None]
        assert len(told) == pytest.approx(MAX_WAIT_S * NUM_PER_S, abs=1) and max(told) <= MAX_WAIT_S
        clock.now_s += 1.001 / NUM_PER_S
        assert pace.try_book() is not None


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 415, 431])
def test_what_blames_the_request_has_a_pace(status: int) -> None:
    assert is_paced(status)


@pytest.mark.parametrize("status", [200, 307, 408, 429, 499, 500, 503, 504, 529])
def test_what_does_not_has_none(status: int) -> None:
    assert not is_paced(status)


class TestAnswers:
    @REFUSED
    def test_is_the_same_after_a_wait(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
        at_once = body_of(server, data)
        monkeypatch.setattr(server.context.refusal_pace, "try_book", lambda: 0.01)
        assert at_once and body_of(server, data) == at_once

    @REFUSED
    def test_is_not_written_before_its_turn(
        self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, data: bytes
    ) -> None:
        monkeypatch.setattr(server.context.refusal_pace, "try_book", lambda: 1000.0)
        with closing(server.connect()) as connection:
            connection.sendall(data)
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        server.wait_until(lambda: num_held(server) == 0)  # who leaves is not waited for

    @REFUSED
    def test_is_none_when_too_many_wait(
        self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data: bytes
    ) -> None:
        monkeypatch.setattr(server.context.refusal_pace, "try_book", lambda: None)
        assert body_of(server, data) == b""
        server.wait_until(lambda: num_held(server) == 0)
        assert caplog.records == []

    def test_waits_when_the_request_is_done_with(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server.context.refusal_pace, "try_book", lambda: 1000.0)
        with closing(server.connect()) as connection:
            connection.sendall(NOT_JSON)
            server.wait_until(lambda: num_held(server) == 1)
            server.wait_until_idle()
            assert num_held(server) == 1
        server.wait_until(lambda: num_held(server) == 0)


def test_only_refusals_take_a_turn(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.context.refusal_pace, "try_book", lambda: pytest.fail("took a turn"))
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert server.client.get(path).status_code == 200
    assert server.complete("Hi", max_tokens=1).status_code == 200
    assert server.complete("Hi", max_tokens=1, stream=True).status_code == 200
    server.engine.is_full = True
    assert server.complete("Hi").status_code == 429


def test_who_is_too_slow_does_not_wait_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server(header_timeout=0.1) as server:
        monkeypatch.setattr(server.context.refusal_pace, "try_book", lambda: pytest.fail("took a turn"))
        assert b"request_timeout" in body_of(server, NO_ROUTE[:-2])


def body_of(server: LiveServer, data: bytes) -> bytes:
    """Of the answer; empty if the server closes without one."""
    with closing(server.connect()) as connection:
        connection.sendall(data)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    return answer.partition(b"\r\n\r\n")[2]


def num_held(server: LiveServer) -> int:
    """Connections and requests that the server still has to do with."""
    state = server.server.server_state
    return len(state.tasks) + len([each for each in state.connections if each._is_refused])  # type: ignore[union-attr]
