"""Error responses to a client that causes many are delayed; no others are, and a client that leaves ends the delay."""

import asyncio
from contextlib import closing

import pytest

from server.limits import error_rate_limit
from server.limits.error_rate_limit import (
    MAX_KNOWN,
    MAX_WAIT_S,
    NUM_AT_ONCE,
    NUM_PER_S,
    ErrorRateLimit,
    Verdict,
    is_rate_limited,
)
from tests.clock import Clock
from tests.server.http.raw_http import answer_to, rest_of
from tests.server.live_server import LiveServer, live_server

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
NOT_JSON = HEAD + b"Content-Length: 1\r\n\r\n{"
NOT_HTTP = b"\0\r\n\r\n"
UNREAD = HEAD + b"Content-Length: 99999999\r\n\r\n"
NO_ROUTE = b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
REFUSED = pytest.mark.parametrize(
    "data", [NOT_JSON, NOT_HTTP, UNREAD, NO_ROUTE], ids=["json", "http", "unread", "route"]
)


def waits(limit: ErrorRateLimit, count: int, client: str = "a") -> list[float]:
    return [limit.reserve(client) for _ in range(count)]


def silent_limit(clock: Clock) -> ErrorRateLimit:
    return ErrorRateLimit(lambda _: None, clock)


def used_up(clock: Clock) -> ErrorRateLimit:
    limit = silent_limit(clock)
    assert waits(limit, NUM_AT_ONCE) == [0.0] * NUM_AT_ONCE
    return limit


class TestTurns:
    def test_a_burst_does_not_wait_and_later_ones_wait_for_all_before(self) -> None:
        limit = used_up(Clock(1000.0))
        assert waits(limit, 3) == pytest.approx([1 / NUM_PER_S, 2 / NUM_PER_S, 3 / NUM_PER_S], abs=1e-6)

    def test_those_that_come_no_faster_than_the_rate_never_wait(self) -> None:
        clock = Clock(1000.0)
        limit = used_up(clock)
        for _ in range(1000):
            clock.now_s += 1.001 / NUM_PER_S
            assert limit.reserve("a") == 0.0

    def test_credit_comes_back_with_time_and_no_more_than_a_burst(self) -> None:
        clock = Clock(1000.0)
        limit = used_up(clock)
        clock.now_s += 10.001 / NUM_PER_S
        assert waits(limit, 11)[9:] == pytest.approx([0.0, 0.999 / NUM_PER_S], abs=1e-6)
        clock.now_s += 1000
        assert waits(limit, NUM_AT_ONCE + 1)[NUM_AT_ONCE - 1 :] == pytest.approx([0.0, 1 / NUM_PER_S], abs=1e-6)

    def test_no_more_wait_than_have_a_turn_in_time_and_the_others_cost_no_turn(self) -> None:
        clock = Clock(1000.0)
        limit = used_up(clock)
        in_time = [wait_s for wait_s in waits(limit, 2 * int(MAX_WAIT_S * NUM_PER_S)) if wait_s <= MAX_WAIT_S]
        assert len(in_time) == pytest.approx(MAX_WAIT_S * NUM_PER_S, abs=1)
        clock.now_s += 1.001 / NUM_PER_S
        assert limit.reserve("a") <= MAX_WAIT_S

    def test_each_has_its_own(self) -> None:
        limit = used_up(Clock(1000.0))
        assert waits(limit, NUM_AT_ONCE, "b") == [0.0] * NUM_AT_ONCE
        assert limit.reserve("a") > 0 and limit.reserve("b") > 0

    def test_of_so_many_the_longest_quiet_is_forgotten(self) -> None:
        limit = used_up(Clock(1000.0))
        waits(limit, NUM_AT_ONCE, "b")
        for number in range(MAX_KNOWN - 2):
            limit.reserve(f"other-{number}")
        assert limit.reserve("a") > 0
        limit.reserve("one more")
        assert limit.reserve("a") > 0 and limit.reserve("b") == 0
        assert len(limit._next_s) == MAX_KNOWN


class TestVerdicts:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(error_rate_limit, "MAX_WAIT_S", 2.5 / NUM_PER_S)

    def turns(self, count: int, *, is_released: bool = False) -> list[str]:
        """Takes `count` turns of one client at once; returns the reported verdicts from the last of the burst on."""
        reported: list[str] = []

        async def all_turns() -> None:
            limit, released = ErrorRateLimit(reported.append, Clock(1000.0)), asyncio.Event()
            if is_released:
                released.set()
            verdicts = await asyncio.gather(*(limit.turn("a", released) for _ in range(count)))
            assert [verdict.value for verdict in verdicts] == reported and limit._num_waiting == 0

        asyncio.run(all_turns())
        return reported[NUM_AT_ONCE - 1 :]

    def test_late_ones_are_delayed_and_later_ones_replaced(self) -> None:
        assert self.turns(NUM_AT_ONCE + 4) == ["at_once", "late", "late", "slow_down", "slow_down"]

    def test_beyond_those_that_may_wait_all_are_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(error_rate_limit, "MAX_WAITING", 1)
        assert self.turns(NUM_AT_ONCE + 3) == ["at_once", "late", "cut_off", "cut_off"]

    def test_a_released_connection_takes_no_turn(self) -> None:
        assert self.turns(NUM_AT_ONCE + 4, is_released=True) == ["at_once"] * 5


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 415, 431])
def test_errors_of_the_client_are_limited(status: int) -> None:
    assert is_rate_limited(status)


@pytest.mark.parametrize("status", [200, 307, 408, 429, 499, 500, 503, 504, 529])
def test_other_statuses_are_not(status: int) -> None:
    assert not is_rate_limited(status)


def wait(monkeypatch: pytest.MonkeyPatch, server: LiveServer, wait_s: float) -> None:
    """Makes every error response wait so long, from now on."""
    monkeypatch.setattr(server.context.error_rate_limit, "reserve", lambda client: wait_s)


class TestAnswers:
    @REFUSED
    def test_is_the_same_after_a_wait(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
        at_once = body_of(server, data)
        wait(monkeypatch, server, 0.01)
        assert at_once and body_of(server, data) == at_once

    @REFUSED
    def test_is_not_written_before_its_turn(
        self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, data: bytes
    ) -> None:
        wait(monkeypatch, server, MAX_WAIT_S)
        with closing(server.connect()) as connection:
            connection.sendall(data)
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        server.wait_until(lambda: num_held(server) == 0)  # a client that leaves ends the delay

    @REFUSED
    def test_is_to_slow_down_when_the_turn_is_too_far(
        self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, data: bytes
    ) -> None:
        monkeypatch.setattr(error_rate_limit, "MAX_WAIT_S", 0.01)
        wait(monkeypatch, server, 0.02)
        answer = answer_to(server, data.replace(b"Connection: close\r\n", b"")).lower()
        assert answer.startswith(b"http/1.1 429 ") and b'"slow_down"' in answer
        assert b"\r\nretry-after: 1\r\n" in answer and b"\r\nconnection: close\r\n" in answer

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
    def test_to_slow_down_has_the_requests_id(
        self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        monkeypatch.setattr(error_rate_limit, "MAX_WAIT_S", 0.01)
        wait(monkeypatch, server, 0.02)
        headers = server.post(path, b"{", {"X-Request-Id": "mine"}).headers
        names = ["x-request-id", "request-id"] if path == "/v1/messages" else ["x-request-id"]
        assert [name for name, value in headers.items() if value == "mine"] == names

    def test_to_slow_down_can_be_read_by_pages_of_other_origins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(error_rate_limit, "MAX_WAIT_S", 0.01)
        with live_server(allowed_origins=["https://x.test"]) as server:
            wait(monkeypatch, server, 0.02)
            refused = server.post("/v1/completions", b"{", {"Origin": "https://x.test"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (429, "https://x.test")

    @REFUSED
    def test_is_none_when_too_many_wait(
        self, server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data: bytes
    ) -> None:
        monkeypatch.setattr(error_rate_limit, "MAX_WAITING", 0)
        wait(monkeypatch, server, 0.01)
        assert answer_to(server, data) == b""
        server.wait_until(lambda: num_held(server) == 0)
        assert caplog.records == []

    def test_waits_when_the_request_is_done_with(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        wait(monkeypatch, server, MAX_WAIT_S)
        with closing(server.connect()) as connection:
            connection.sendall(NOT_JSON)
            server.wait_until(lambda: num_held(server) == 1)
            server.wait_until_idle()
            assert num_held(server) == 1
        server.wait_until(lambda: num_held(server) == 0)

    @REFUSED
    def test_makes_room_for_new_connections(self, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
        with live_server(max_connections=2) as server, closing(server.connect()) as idle:
            assert server.client.get("/health").status_code == 200
            wait(monkeypatch, server, MAX_WAIT_S)
            idle.close()
            server.wait_until(lambda: len(server.server.server_state.connections) == 1)
            with closing(server.connect()) as held:
                held.sendall(data)
                server.wait_until(lambda: num_waiting(server) == 1)
                assert b"200" in answer_to(server, HEALTH)[:20]
                assert rest_of(held) == b""
            assert server.client.get("/health").status_code == 200  # on its old connection: idle ones are kept

    @REFUSED
    def test_is_written_at_once_when_the_server_ends(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data: bytes
    ) -> None:
        with live_server() as server, closing(server.connect()) as held:
            at_once = status_of(answer_to(server, data))
            wait(monkeypatch, server, MAX_WAIT_S)
            held.sendall(data)
            server.wait_until(lambda: num_waiting(server) == 1)
            server.server.should_exit = True
            assert status_of(rest_of(held)) in (at_once, 503)  # of a body not read: send it to another one
        assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_each_key_and_each_address_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[str] = []
    with live_server(api_key=["secret"]) as server:
        monkeypatch.setattr(server.context.error_rate_limit, "reserve", lambda client: reserved.append(client) or 0.0)
        with_key = NOT_JSON.replace(b"Host: x\r\n", b"Host: x\r\nAuthorization: Bearer secret\r\n")
        for data in (with_key, NOT_JSON, NOT_HTTP):
            assert body_of(server, data)
    [key] = server.context.keys._keys
    assert reserved == [key.name, "peer 127.0.0.1", "peer 127.0.0.1"]


def test_refusals_are_counted_by_what_became_of_them(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = server.context.metrics._refusal_answers.labels
    before = [counter(verdict.value)._value.get() for verdict in Verdict]
    body_of(server, NOT_JSON)
    wait(monkeypatch, server, 0.01)
    body_of(server, NOT_JSON)
    after = [counter(verdict.value)._value.get() for verdict in Verdict]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 0, 0]


def test_only_refusals_take_a_turn(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.context.error_rate_limit, "reserve", lambda client: pytest.fail("took a turn"))
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert server.client.get(path).status_code == 200
    assert server.complete("Hi", max_tokens=1).status_code == 200
    assert server.complete("Hi", max_tokens=1, stream=True).status_code == 200
    server.engine.is_full = True
    assert server.complete("Hi").status_code == 429


def test_a_timeout_does_not_wait_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server(header_timeout=0.1) as server:
        monkeypatch.setattr(server.context.error_rate_limit, "reserve", lambda client: pytest.fail("took a turn"))
        assert b"request_timeout" in body_of(server, NO_ROUTE[:-2])


def body_of(server: LiveServer, data: bytes) -> bytes:
    return answer_to(server, data).partition(b"\r\n\r\n")[2]


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def num_waiting(server: LiveServer) -> int:
    return server.context.error_rate_limit._num_waiting


def num_held(server: LiveServer) -> int:
    """Returns how many tasks and refused connections the server still has."""
    state = server.server.server_state
    return len(state.tasks) + len([each for each in state.connections if each._is_refused])  # type: ignore[union-attr]
