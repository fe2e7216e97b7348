"""Paths with slashes too many, and requests without a host or with two, of other versions or transfer codings."""

import re

import httpx
import pytest

from tests.server.events import error_of
from tests.server.http.raw_http import GET, POST, answer_to, body_of, post, send, status_and_code
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


@pytest.mark.parametrize("line", [b"GET /version", b"GET /version HTTP/0.9", b"GET /version HTTP/2.0"])
def test_other_versions_are_refused(server: LiveServer, line: bytes) -> None:
    answer = answer_to(server, line + b"\r\nHost: x\r\n" + CLOSING + b"\r\n")
    assert status_and_code(answer) == (400, "invalid_request_error")


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body_of()), body_of())


@pytest.mark.parametrize(
    "codings", [[b"gzip, chunked"], [b"gzip", b"chunked"], [b"chunked", b"chunked"], [b"identity"]]
)
def test_bodies_have_no_transfer_coding_but_chunked(server: LiveServer, codings: list[bytes]) -> None:
    head = POST + CLOSING + b"".join(b"Transfer-Encoding: %b\r\n" % each for each in codings)
    assert status_and_code(answer_to(server, head + b"\r\n" + CHUNKED)) == (400, "invalid_request_error")
    assert server.engine.requests == []


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked "])
def test_chunked_alone_is_read(server: LiveServer, coding: bytes) -> None:
    answer = answer_to(server, POST + CLOSING + b"Transfer-Encoding: %b\r\n\r\n" % coding + CHUNKED)
    assert answer.startswith(b"HTTP/1.1 200")
