"""Requests with an `Upgrade` header are answered over HTTP/1.1."""

import json
from contextlib import closing

import pytest

from tests.server.http.raw_http import GET, POST, answer_to, rest_of, send, status_and_code
from tests.server.live_server import LiveServer

POST_UPGRADE = POST + (
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
)


def test_an_upgrade_is_answered_as_if_it_were_not_asked_for_and_ends_the_connection(server: LiveServer) -> None:
    answer = answer_to(server, GET[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + GET)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("size", [1, 7, 60, 100_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_body_of_a_request_that_asks_for_an_upgrade_is_read(
    server: LiveServer, size: int, is_chunked: bool
) -> None:
    """Java's client sends the body along; it may come in pieces of any size, and what follows it is not read."""
    content = b'{"prompt": "Hi", "max_tokens": 3}'
    framed = b"%x\r\n%s\r\n0\r\nX: trailer\r\n\r\n" % (len(content), content) if is_chunked else content
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(content)
    sent = POST_UPGRADE + framing + b"\r\n\r\n" + framed + GET + b"\0\0"
    with closing(server.connect()) as connection:
        for start in range(0, len(sent), size):
            send(connection, sent[start : start + size])
        answer = rest_of(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 3


def test_a_broken_body_of_a_request_that_asks_for_an_upgrade_is_refused(server: LiveServer) -> None:
    answer = answer_to(server, POST_UPGRADE + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n")
    assert status_and_code(answer) == (400, "invalid_request_error")


def test_an_empty_body_of_a_request_that_asks_for_an_upgrade_is_empty(server: LiveServer) -> None:
    answer = answer_to(server, POST_UPGRADE + b"Content-Length: 0\r\n\r\n")
    assert status_and_code(answer) == (400, "invalid_request_error")
