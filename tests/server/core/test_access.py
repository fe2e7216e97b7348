"""API keys, origins, body limits, request ids and the access log."""

import asyncio
import json
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.host.log_format import JsonFormatter
from server.auth.api_keys import new_key
from server.core.errors import BodyTooLargeError, RequestTooSlowError
from server.middleware.body_limit import BodyLimitMiddleware
from tests import virtual_time
from tests.server.events import error_of
from tests.server.live_server import LiveServer, live_server

ROUTES = [
    "/v1/models",
    "/version",
    "/stats",
    "/stats/timeline",
    "/stats/diagnosis",
    "/server_info",
    "/openapi.json",
    "/nothing",
]


@pytest.fixture(scope="module")
def keyed() -> Generator[LiveServer, None, None]:
    with live_server(api_key=["one", "schlüssel"]) as server:
        yield server


@pytest.fixture(scope="module")
def small() -> Generator[LiveServer, None, None]:
    with live_server(max_body_bytes=1000) as server:
        yield server


class TestApiKeys:
    @pytest.mark.parametrize(
        "authorization",
        [None, "", "Bearer", "Bearer wrong", "Basic one", "one", "Bearer one two", "Bearer on", "Bearer øne"],
    )
    def test_without_a_right_key_nothing_is_answered(self, keyed: LiveServer, authorization: str | None) -> None:
        headers = {} if authorization is None else {b"Authorization": authorization.encode()}
        for path in ROUTES:
            response = keyed.client.get(path, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert keyed.complete("Hi").status_code == 401

    @pytest.mark.parametrize("authorization", ["Bearer one", "bearer one", "Bearer  one", "Bearer schlüssel"])
    def test_each_key_opens(self, keyed: LiveServer, authorization: str) -> None:
        headers = {b"Authorization": authorization.encode()}
        assert keyed.client.get("/v1/models", headers=headers).status_code == 200

    @pytest.mark.parametrize("path", ["/metrics", "/health", "/ready"])
    def test_probes_need_no_key(self, keyed: LiveServer, path: str) -> None:
        assert keyed.client.get(path).status_code == 200

    def test_no_response_shows_a_key(self, keyed: LiveServer) -> None:
        info = keyed.client.get("/server_info", headers={"Authorization": "Bearer one"})
        assert info.status_code == 200 and "schlüssel" not in info.text and "api_key" not in info.text


class TestOrigins:
    def test_scripts_of_other_origins_are_kept_out(self, server: LiveServer) -> None:
        response = server.client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert not [name for name in response.headers if name.startswith("access-control")]

    def test_allowed_origins_may_call_and_read_the_headers(self) -> None:
        with live_server(allowed_origins=["https://a.example"], api_key=["k"]) as server:
            ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
            assert server.client.options("/v1/completions", headers=ask).status_code == 200
            response = server.complete("Hi", headers={"Origin": "https://a.example", "Authorization": "Bearer k"})
            assert response.headers["access-control-allow-origin"] == "https://a.example"
            exposed = response.headers["access-control-expose-headers"].split(", ")
            assert {"X-TTFT-Ms", "Retry-After", "Request-Id"} <= set(exposed)
            private = ask | {"Access-Control-Request-Private-Network": "true"}
            preflight = server.client.options("/v1/completions", headers=private)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-private-network"] == "true"
            stranger = private | {"Origin": "https://b.example"}
            assert server.client.options("/v1/completions", headers=stranger).status_code == 400
            refused = server.client.get("/v1/models", headers={"Origin": "https://b.example"})
            assert "access-control-allow-origin" not in refused.headers


class TestBodyLimit:
    def test_a_declared_length_over_the_limit_is_refused_unread(self, small: LiveServer) -> None:
        with small.connect() as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 413")

    @pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
    def test_a_chunked_body_is_measured_while_it_is_read(self, small: LiveServer, path: str) -> None:
        response = small.client.post(
            path, content=iter([b" " * 100] * 11), headers={"Content-Type": "application/json"}
        )
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")

    def test_an_endless_body_does_not_reach_memory(self, small: LiveServer) -> None:
        with small.connect() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n1\r\n \r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 413")

    def test_the_parts_are_added_up(self) -> None:
        parts = iter([b" " * 600, b" " * 600])

        async def receive() -> Message:
            return {"type": "http.request", "body": next(parts), "more_body": True}

        async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
            while True:
                await receive()

        with pytest.raises(BodyTooLargeError):
            send_body(read_all, receive, max_body_bytes=1000, timeout_s=20.0)

    def test_what_has_come_gives_its_sender_more_time(self) -> None:
        async def receive() -> Message:
            await asyncio.sleep(0.05)
            return {"type": "http.request", "body": b" " * 2**20, "more_body": True}

        async def read_some(scope: Scope, receive: Receive, send: Send) -> None:
            for _ in range(4):
                await receive()

        send_body(read_some, receive, max_body_bytes=2**30, timeout_s=0.1)

    def test_its_sender_is_not_blamed_while_nobody_reads(self) -> None:
        """A large body waits for a slot after its beginning has arrived."""

        async def receive() -> Message:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def read_late(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await asyncio.sleep(0.8)
            await receive()

        send_body(read_late, receive, max_body_bytes=1000, timeout_s=0.5)

    def test_the_waits_for_its_parts_are_added_up(self) -> None:
        async def receive() -> Message:
            await asyncio.sleep(0.03)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
            while True:
                await receive()

        with pytest.raises(RequestTooSlowError):
            send_body(read_all, receive, max_body_bytes=1000, timeout_s=0.1)

    def test_the_limit_itself_is_within_it(self, small: LiveServer) -> None:
        body = b'{"prompt": "Hi"}'
        assert small.post("/v1/completions", body + b" " * (1000 - len(body))).status_code == 200


def send_body(app: ASGIApp, receive: Receive, max_body_bytes: int, timeout_s: float) -> None:
    """Runs the app behind the body limit, in virtual time, with a body that `receive` delivers."""

    async def send(_: Message) -> None:
        raise AssertionError("nothing is answered")

    limited = BodyLimitMiddleware(app, max_body_bytes, timeout_s)
    virtual_time.run(limited({"type": "http", "headers": []}, receive, send))


class TestRequestIds:
    @pytest.mark.parametrize("given", ["a", "x" * 128, "A-1.b_2/=:;,?"])
    def test_sane_ids_are_echoed(self, server: LiveServer, given: str) -> None:
        assert server.client.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given

    @pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", "ä".encode()])
    def test_others_are_replaced(self, server: LiveServer, given: bytes) -> None:
        made = server.client.get("/health", headers={b"X-Request-Id": given}).headers["x-request-id"]
        assert made.encode() != given and made.startswith("req-")

    @pytest.mark.parametrize("path", ["/nothing", "/v1/models", "/metrics"])
    def test_every_response_has_one(self, server: LiveServer, path: str) -> None:
        first, second = (server.client.get(path).headers["x-request-id"] for _ in range(2))
        assert first != second

    def test_the_body_may_name_the_request_unless_the_header_does(self, server: LiveServer) -> None:
        assert server.complete("Hi", request_id="body").headers["x-request-id"] == "body"
        response = server.complete("Hi", request_id="body", headers={"X-Request-Id": "header"})
        assert response.headers["x-request-id"] == "header" and response.json()["id"] == "cmpl-header"

    @pytest.mark.parametrize("wrong", [{"model": "nope"}, {"n": 0}, {"regex": "a"}, {"deadline_ms": "soon"}])
    def test_a_refusal_has_the_name_that_its_body_gave(self, server: LiveServer, wrong: dict[str, Any]) -> None:
        response = server.complete("Hi", request_id="body", **wrong)
        assert response.is_error and response.headers["x-request-id"] == "body"
        named = {**wrong, "request_id": "body", "headers": {"X-Request-Id": "header"}}
        assert server.complete("Hi", **named).headers["x-request-id"] == "header"

    def test_one_name_may_be_used_at_the_same_time(self, server: LiveServer) -> None:
        server.engine.hold_at = 0
        first = [connection_with_id(server, "same") for _ in range(2)]
        server.wait_until(lambda: server.engine.num_live == 2)
        assert [request.client_request_id for request in server.engine.requests] == ["same", "same"]
        for connection in first:
            connection.close()


def connection_with_id(server: LiveServer, request_id: str, body: bytes = b'{"prompt": "Hi"}') -> socket.socket:
    connection = server.connect()
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return connection


class TestAccessLog:
    @pytest.mark.parametrize(("hold_at", "status", "num_tokens"), [(0, 499, None), (5, 200, 5)])
    def test_the_log_names_clients_that_left(
        self, server: LiveServer, caplog: pytest.LogCaptureFixture, hold_at: int, status: int, num_tokens: int | None
    ) -> None:
        server.engine.hold_at = hold_at
        with caplog.at_level("INFO", logger="twostep.access"):
            connection = connection_with_id(server, "mine", b'{"prompt": "Hi", "stream": true}')
            server.wait_until(lambda: server.engine.num_holding == 1)
            connection.close()
            server.wait_until_idle()
        (line,) = [record.getMessage() for record in caplog.records]
        assert f" {status} " in line and "client=left" in line and "decode_ms" not in line
        assert num_tokens is None or f"generated_tokens={num_tokens} " in line

    def test_one_line_tells_the_phases(self, server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="twostep.access"):
            server.complete("Hi", max_tokens=3, headers={"X-Request-Id": "mine"})
            server.complete("Hi", max_tokens=3, stream=True)
            server.complete("Hi", max_tokens=3, stream=True, headers={"Connection": "close"})
            server.wait_until_idle()
        first, *others = [record.getMessage() for record in caplog.records]
        assert len(others) == 2
        for line in (first, *others):
            assert "client=left" not in line
            assert line.startswith("POST /v1/completions 200 ")
            assert "prompt_tokens=3 cached_tokens=0 generated_tokens=3 queue_ms=1.0 prefill_ms=2.0 ttft_ms=3.0" in line
            assert "decode_ms=1.0 itl_ms=0.5 e2e_ms=4.0" in line
        assert "id=mine peer=127.0.0.1 model=fake finish=length prompt_tokens=3" in first

    def test_the_fields_of_a_line_are_told_apart(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        secret, entry = new_key("alice")
        (tmp_path / "keys").write_text(entry)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2}
        headers = {"Authorization": f"Bearer {secret}", "X-Request-Id": "mine"}
        with live_server(api_keys_file=tmp_path / "keys") as server, caplog.at_level("INFO", logger="twostep.access"):
            assert server.post_json("/v1/chat/completions", body, headers).status_code == 200
            assert server.complete("Hi").status_code == 401
            server.wait_until_idle()
        answered, refused = [
            json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "twostep.access"
        ]
        assert answered["message"].startswith("POST /v1/chat/completions 200 ")
        facts = {"level": "info", "method": "POST", "path": "/v1/chat/completions", "status": 200, "id": "mine"}
        facts |= {"key": "alice", "peer": "127.0.0.1", "model": "fake", "finish": "length", "generated_tokens": 6}
        assert facts.items() <= answered.items() and answered["duration_ms"] > 0 and "error" not in answered
        assert answered["e2e_ms"] >= answered["ttft_ms"] > 0
        assert (refused["status"], refused["error"]) == (401, "invalid_api_key") and "key" not in refused
        assert secret not in caplog.text

    def test_probes_are_quiet_and_errors_named(self, server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="twostep.access"):
            for path in ("/health", "/ready", "/metrics", "/load", "/no%0Awhere"):
                server.client.get(path)
            server.wait_until_idle()
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("GET '/no\\nwhere' 404 ") and "error=not_found" in line

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
    def test_a_stream_that_breaks_is_named_and_no_refusal(self, path: str, caplog: pytest.LogCaptureFixture) -> None:
        body = {"stream": True, "max_tokens": 3}
        body |= {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
        with live_server(api_key=["one"]) as server, caplog.at_level("INFO", logger="twostep.access"):
            server.engine.fail_at = 1
            assert server.post_json(path, body, {"Authorization": "Bearer one"}).status_code == 200
            server.wait_until_idle()
            text = server.client.get("/metrics", headers={"Authorization": "Bearer one"}).text
        assert 'twostep_broken_streams_total{reason="internal_error"} 1.0' in text
        assert "_rejections_total{" not in text and "twostep_key_requests_total{" in text
        (line,) = [record.getMessage() for record in caplog.records if record.name == "twostep.access"]
        assert f"POST {path} 200 " in line and "error=internal_error" in line
