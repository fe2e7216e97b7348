"""Load shedding: which requests are refused before they become tasks, with which response, and what is counted."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.core.generation_request import Tenant
from server.app import generation_routes
from server.limits import retry_throttle
from server.limits.request_turns import RequestTurns
from server.runtime.lifecycle import State
from tests.server.http.raw_http import answer_to, rest_of
from tests.server.live_server import FakeBackend, LiveServer, live_server

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ASK = HEAD + b"Content-Length: 2\r\n\r\n{}"
LAST = HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
NOT_PLAIN = ["Origin: http://a", "Expect: 100-continue", "Upgrade: h2c", "Content-Length: 65536"]


@pytest.fixture
def full(server: LiveServer) -> LiveServer:
    server.engine.is_full = True
    return server


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of requests that became tasks."""
    started: list[str] = []
    start = HttpToolsProtocol._start_asgi_task

    def noting_start(self: HttpToolsProtocol, cycle: RequestResponseCycle, app: Any) -> None:
        started.append(cycle.scope["path"])
        start(self, cycle, app)

    monkeypatch.setattr(HttpToolsProtocol, "_start_asgi_task", noting_start)
    return started


@pytest.fixture(autouse=True)
def _no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_throttle, "MIN_GAP_S", 0.0)


@pytest.fixture
def keyed() -> Generator[LiveServer, None, None]:
    with live_server(api_key=["secret"]) as server:
        server.engine.is_full = True
        yield server


def test_all_routes_that_generate_have_it() -> None:
    paths = {"completions", "chat/completions", "responses", "messages", "embeddings"}
    of_ollama = {"chat", "generate", "embed", "embeddings"}
    assert generation_routes().keys() == {*(f"/v1/{path}" for path in paths), *(f"/api/{path}" for path in of_ollama)}


@pytest.mark.parametrize("path", sorted(generation_routes()))
def test_no_task_is_made_and_the_response_is_the_same(full: LiveServer, tasks: list[str], path: str) -> None:
    early = full.post(path, b"{}", {"X-Request-Id": "mine"})
    assert tasks == []
    late = full.post(path, b"{}", {"X-Request-Id": "mine", "Origin": "http://a"})
    assert tasks == [path]
    assert (early.status_code, early.content) == (late.status_code, late.content) == (429, early.content)
    del early.headers["date"], late.headers["date"]
    assert early.headers == late.headers and early.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("header", NOT_PLAIN)
def test_what_the_head_does_not_decide_is_refused_by_the_app(full: LiveServer, tasks: list[str], header: str) -> None:
    plain = header if header.startswith("Content-Length") else f"{header}\r\nContent-Length: 2"
    answer = answer_to(full, HEAD + f"Connection: close\r\n{plain}\r\n\r\n".encode() + b"{}" * 32768)
    assert b" 429 " in answer.partition(b"\r\n")[0] and tasks == ["/v1/completions"]


def test_while_the_engine_restarts_there_is_a_retry_after(server: LiveServer, tasks: list[str]) -> None:
    server.engine.is_restarting = True
    early = server.post("/v1/completions", b"{}", {"X-Request-Id": "mine"})
    assert (early.status_code, early.headers["retry-after"], tasks) == (503, "8", [])
    late = server.post("/v1/completions", b"{}", {"X-Request-Id": "mine", "Origin": "http://a"})
    assert (late.status_code, late.content) == (early.status_code, early.content)


def test_what_is_not_refused_takes_the_turn_of_its_key_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []
    start = RequestTurns.start

    def noting_start(self: RequestTurns, caller: Callable[[], str], begin: Callable[[], None]) -> None:
        callers.append(caller())
        start(self, caller, begin)

    monkeypatch.setattr(RequestTurns, "start", noting_start)
    with live_server(api_key=["secret"]) as server:
        for secret in ("secret", "wrong"):
            server.post("/v1/completions", b"{}", {"Authorization": f"Bearer {secret}"})
        server.client.get("/health")
    assert callers == ["default", "peer 127.0.0.1", "peer 127.0.0.1"]


def break_door(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_admission(tenant: Tenant) -> None:
        raise RuntimeError("A bug.")

    monkeypatch.setattr(server.engine, "check_admission", check_admission)


def test_what_fails_is_left_to_a_task_which_answers_500(
    server: LiveServer, tasks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_door(server, monkeypatch)
    assert server.post("/v1/completions", b"{}").status_code == 500
    assert tasks == ["/v1/completions"]


def test_others_are_answered_by_the_app(full: LiveServer, tasks: list[str]) -> None:
    assert full.client.get("/v1/completions").status_code == 405
    assert full.post("/tokenize", b'{"prompt": "Hi"}').status_code == 200
    full.engine.is_full = False
    assert full.complete("Hi").status_code == 200
    assert tasks == ["/v1/completions", "/tokenize", "/v1/completions"]


def test_it_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with live_server() as server, caplog.at_level("INFO", "twostep.access"):
        server.engine.is_full = True
        server.post("/v1/completions", b"{}", {"X-Request-Id": "mine"})
        text = server.client.get("/metrics").text.splitlines()
        server.wait_until_idle()
    [line] = [record.getMessage() for record in caplog.records if record.name == "twostep.access"]
    assert line.startswith("POST /v1/completions 429 ") and line.endswith(" id=mine peer=127.0.0.1 error=slow_down")
    assert 'twostep_http_requests_total{handler="/v1/completions",method="POST",status="429"} 1.0' in text
    assert 'twostep_rejections_total{reason="slow_down"} 1.0' in text


def test_it_is_counted_for_its_key(keyed: LiveServer, tasks: list[str]) -> None:
    assert keyed.post("/v1/completions", b"{}", {"Authorization": "Bearer secret"}).status_code == 429
    assert tasks == []
    [key] = keyed.context.keys._keys
    assert keyed.engine.last_tenant_checked is not None and keyed.engine.last_tenant_checked.name == key.name
    text = keyed.client.get("/metrics", headers={"Authorization": "Bearer secret"}).text.splitlines()
    assert f'twostep_key_requests_total{{key="{key.name}"}} 1.0' in text
    assert f'twostep_key_rejections_total{{key="{key.name}",reason="slow_down"}} 1.0' in text


def test_requests_without_a_key_learn_nothing_of_the_queue(keyed: LiveServer) -> None:
    assert keyed.post("/v1/completions", b"{}").status_code == 401
    assert keyed.engine.last_tenant_checked is None


def test_a_server_that_drains_says_so(keyed: LiveServer) -> None:
    keyed.context.lifecycle.state = State.DRAINING
    assert keyed.post("/v1/completions", b"{}", {"Authorization": "Bearer secret"}).status_code == 503


def test_a_server_that_loads_says_so() -> None:
    backend = FakeBackend(is_loading=True)
    backend.engine.is_full = True
    with live_server(backend) as server:
        assert server.post("/v1/completions", b"{}").status_code == 503


def test_the_connection_is_kept_and_the_body_skipped(full: LiveServer) -> None:
    with closing(full.connect()) as connection:
        connection.sendall(ASK[:-2])
        assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
        full.engine.is_full = False
        connection.sendall(b"{}" + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert rest_of(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("num_late", [0, 2])
def test_the_connection_is_closed_if_the_client_says_so_once_it_has_sent_all(full: LiveServer, num_late: int) -> None:
    with closing(full.connect()) as connection:
        connection.sendall(LAST[: len(LAST) - num_late])
        answer = connection.recv(65536)
        connection.sendall(LAST[len(LAST) - num_late :])
        assert b"\r\nconnection: close\r\n" in answer and rest_of(connection) == b""


def test_pipelined_requests_are_refused_in_their_order(full: LiveServer, tasks: list[str]) -> None:
    ids = [b"X-Request-Id: %d\r\n" % number for number in range(5)]
    asked = b"".join(ASK.replace(b"Host", each + b"Host") for each in ids[:-1])
    answer = answer_to(full, asked + LAST.replace(b"Host", ids[-1] + b"Host"))
    lines = [line for line in answer.split(b"\r\n") if line.startswith(b"x-request-id")]
    assert lines == [b"x-request-id: %d" % number for number in range(5)] and tasks == []


class TestRetries:
    """A request that follows a refusal at once, on the same connection."""

    @pytest.fixture(autouse=True)
    def _gap(self, _no_gap: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retry_throttle, "MIN_GAP_S", 0.05)

    def test_is_handled_a_moment_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retry_throttle, "MAX_WAIT_S", 60.0)
        monkeypatch.setattr(retry_throttle, "MIN_GAP_S", 60.0)
        with live_server() as server, closing(server.connect()) as connection:
            server.engine.is_full = True
            connection.sendall(ASK)
            assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
            connection.sendall(ASK)
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)

    def test_is_admitted_if_there_is_room_by_then(
        self, full: LiveServer, tasks: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client that has left by then is not answered at all."""
        monkeypatch.setattr(retry_throttle, "MIN_GAP_S", 1.0)  # time for this test to be late
        with closing(full.connect()) as first, closing(full.connect()) as second:
            for connection in (first, second):
                connection.sendall(ASK)
                assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
                connection.sendall(full.request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 1}))
                if connection is first:
                    first.close()
            second.settimeout(0.1)
            with pytest.raises(TimeoutError):
                second.recv(1)
            full.engine.is_full = False
            second.settimeout(10)
            assert second.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert tasks == ["/v1/completions"]

    def test_has_its_response_in_turn_and_the_connection_closes_after_the_last(self, full: LiveServer) -> None:
        assert answer_to(full, ASK + ASK + LAST).count(b"HTTP/1.1 429 ") == 3

    def test_gets_503_while_the_engine_restarts(self, server: LiveServer) -> None:
        server.engine.is_restarting = True
        assert answer_to(server, ASK + ASK + LAST).count(b"HTTP/1.1 503 ") == 3

    def test_is_answered_by_a_task_where_the_check_fails(
        self, full: LiveServer, tasks: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(full.connect()) as connection:
            connection.sendall(ASK)
            assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
            break_door(full, monkeypatch)
            connection.sendall(LAST)
            assert rest_of(connection).startswith(b"HTTP/1.1 500 ")
        assert tasks == ["/v1/completions"]

    def test_on_another_connection_is_not_held_up(self, full: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retry_throttle, "MIN_GAP_S", 60.0)
        assert [answer_to(full, LAST)[9:12] for _ in range(3)] == [b"429"] * 3


def connections_of(server: LiveServer) -> list[HttpToolsProtocol]:
    return [each for each in server.server.server_state.connections if isinstance(each, HttpToolsProtocol)]


def test_a_client_that_reads_no_responses_gets_a_task_which_waits(full: LiveServer, tasks: list[str]) -> None:
    with closing(full.connect()) as connection:
        connection.sendall(ASK[:4])
        full.wait_until(lambda: any(getattr(each, "url", None) == b"" for each in connections_of(full)))
        for each in connections_of(full):
            each.flow.write_paused = True
        connection.sendall(ASK[4:])
        full.wait_until(lambda: tasks == ["/v1/completions"])


def test_the_delay_of_a_retry_counts_as_its_latency(full: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_throttle, "MIN_GAP_S", 0.3)
    with closing(full.connect()) as connection:
        connection.sendall(ASK)
        assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")
        full.engine.is_full = False
        connection.sendall(full.request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 1}))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert time.monotonic() - full.engine.requests[0].arrival_s > 0.25
