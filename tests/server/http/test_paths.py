"""Paths with slashes too many, and requests without a host or with two."""

import re

import httpx
import pytest

from tests.server.events import error_of
from tests.server.http.raw_http import GET, answer_to, body_of, post, send, status_and_code
from tests.server.live_server import LiveServer, live_server
from tests.server.metrics.published_metrics import advance

CLOSING = b"Connection: close\r\n"
PATHS = ["//v1/completions", "/v1/completions/", "/v1//completions", "///v1///completions//"]


@pytest.mark.parametrize("path", PATHS)
def test_slashes_too_many_change_nothing(server: LiveServer, path: str) -> None:
    def ask() -> None:
        assert httpx.post(f"{server.url}{path}?x=//", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200

    handled = {"handler": "/v1/completions", "method": "POST", "status": "200"}
    assert advance(server, ask)("twostep_http_requests_total", **handled) == 1


@pytest.mark.parametrize("path", PATHS)
def test_keys_and_limits_see_the_plain_path(path: str) -> None:
    with live_server(api_key=["k"]) as server:
        refused = httpx.post(f"{server.url}{path}", json={"prompt": "Hi"})
        assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{server.url}//health/").status_code == 200
        server.engine.is_full = True
        headers = {"Authorization": "Bearer k"}
        assert httpx.post(f"{server.url}{path}", json={"prompt": "Hi"}, headers=headers).status_code == 429
        assert server.engine.last_tenant_checked is not None


def test_errors_of_anthropics_routes_keep_their_form(server: LiveServer) -> None:
    assert httpx.post(f"{server.url}//v1/messages/", json={}).json()["type"] == "error"


@pytest.mark.parametrize("name", ["/data/model/", "org/model", "/m"])
def test_a_model_that_is_a_path_is_found_under_it(name: str) -> None:
    with live_server(served_model_name=[name]) as server:
        assert httpx.get(f"{server.url}/v1/models/{name}").json()["id"] == name
        assert server.client.get(f"/v1/models/{name.replace('/', '%2F')}").json()["id"] == name
        assert httpx.get(f"{server.url}/v1/models/other").status_code == 404


@pytest.mark.parametrize("host", [b"", b"Host: x\r\nHost: x\r\n", b"Host: x\r\nhost: y\r\n"])
@pytest.mark.parametrize("request_", [GET, post(body_of())])
def test_a_request_has_one_host(server: LiveServer, request_: bytes, host: bytes) -> None:
    answer = answer_to(server, request_.replace(b"Host: x\r\n", host + CLOSING))
    assert status_and_code(answer) == (400, "invalid_request_error") and b"Host" in answer
    assert server.engine.requests == []


@pytest.mark.parametrize("request_", [b"GET /version HTTP/1.0\r\n\r\n", GET.replace(b"x\r\n", b"\r\n" + CLOSING)])
def test_older_requests_need_no_host_and_a_host_may_be_empty(server: LiveServer, request_: bytes) -> None:
    assert re.match(rb"HTTP/1.1 200", answer_to(server, request_))


def test_a_pipelined_request_has_a_host_too(server: LiveServer) -> None:
    server.engine.hold_at = 0
    with server.connect() as connection:
        send(connection, post(body_of()), GET.replace(b"Host: x\r\n", b""))
        assert connection.recv(100) == b""
