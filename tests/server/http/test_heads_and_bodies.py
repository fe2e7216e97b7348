"""Limits of one request, tested over raw sockets: heads, bodies, and responses to clients of HTTP/1.0."""

import socket
from contextlib import closing

import pytest

from tests.server.http.raw_http import (
    GET,
    POST,
    answer_to,
    body_of,
    is_open,
    num_connections,
    post,
    rest_of,
    send,
    status_and_code,
)
from tests.server.live_server import LiveServer


def old(request: bytes) -> bytes:
    return request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)


def until_brace(connection: socket.socket) -> bytes:
    """Reads a response up to the end of its JSON."""
    answer = b""
    while not answer.endswith(b"}}"):
        answer += connection.recv(65536)
    return answer


class TestOldClients:
    """Clients of HTTP/1.0, which know no chunked encoding."""

    def test_a_stream_ends_with_its_connection(self, server: LiveServer) -> None:
        head, _, body = answer_to(server, old(post(body_of(stream=True)))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head and b"transfer-encoding" not in head
        assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")

    @pytest.mark.parametrize("request_", [GET, post(body_of()), post(body_of(n=0))])
    def test_what_has_a_length_declares_it(self, server: LiveServer, request_: bytes) -> None:
        head, _, body = answer_to(server, old(request_)).partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n" and b"transfer-encoding" not in head


class TestHeads:
    @pytest.mark.parametrize(
        "parts",
        [
            (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",),
            (GET[:-2], b"X: " + b"x" * 70_000 + b"\r\n\r\n"),
            (GET[:-2], b"a: b\r\n" * 20_000 + b"\r\n"),
            (b"GET /", *[b"x" * 65_536] * 1600),  # 100 MB
            (GET[:-2], b"X: ", *[b"x" * 65_536] * 1600),
        ],
        ids=["url", "field", "fields", "endless url", "endless field"],
    )
    def test_too_large_a_head_is_cut_off(self, server: LiveServer, parts: tuple[bytes, ...]) -> None:
        answer = answer_to(server, *parts)
        assert answer == b"" or status_and_code(answer) == (431, "headers_too_large")  # the answer may drown

    def test_a_head_just_within_the_limit_is_read(self, server: LiveServer) -> None:
        answer = answer_to(server, GET[:-2] + b"Connection: close\r\nX: " + b"x" * 65_000 + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")

    def test_a_large_body_does_not_count_as_head(self, server: LiveServer) -> None:
        with closing(server.connect()) as connection:
            for _ in range(3):
                send(connection, post(body_of(prompt="x" * 400_000)))
                assert b"maximum context length" in until_brace(connection)  # and no 431

    @pytest.mark.parametrize(
        "junk", [b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\0\xa5"]
    )
    def test_what_is_not_http_is_refused_in_our_shape(self, server: LiveServer, junk: bytes) -> None:
        assert status_and_code(answer_to(server, junk)) == (400, "invalid_request_error")

    @pytest.mark.parametrize(
        "fields",
        [
            b"Content-Length: 5\r\nContent-Length: 6\r\n",
            b"Content-Length: -1\r\n",
            b"Content-Length: 99999999999999999999999\r\n",
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            b"Transfer-Encoding: chunked, identity\r\n",
        ],
    )
    def test_doubtful_lengths_are_refused(self, server: LiveServer, fields: bytes) -> None:
        assert status_and_code(answer_to(server, POST + fields + b"\r\n12345")) == (400, "invalid_request_error")

    def test_a_silent_connection_is_closed_without_a_response(self, impatient: LiveServer) -> None:
        assert answer_to(impatient) == b""

    @pytest.mark.parametrize("head", [b"G", GET[:-2], b"\r\n", b"\r\n\r\n\r\n"])
    def test_a_head_that_does_not_end_is_cut_off(self, impatient: LiveServer, head: bytes) -> None:
        answer = answer_to(impatient, head)
        assert answer == b"" if head.isspace() else status_and_code(answer) == (408, "request_timeout")

    def test_also_on_a_connection_that_was_used(self, impatient: LiveServer) -> None:
        with closing(impatient.connect()) as connection:
            assert is_open(connection) and is_open(connection)
            send(connection, b"GET /vers")
            assert status_and_code(rest_of(connection)) == (408, "request_timeout")

    def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut_off(self, impatient: LiveServer) -> None:
        impatient.engine.reset()
        impatient.engine.delay_s = 0.05
        assert impatient.complete("Hi", max_tokens=10).json()["usage"]["completion_tokens"] == 10

    def test_what_is_refused_before_it_is_a_request_is_counted(self, server: LiveServer) -> None:
        counter = 'twostep_rejections_total{reason="headers_too_large"} '
        before = server.client.get("/metrics").text.partition(counter)[2].partition("\n")[0] or "0"
        answer_to(server, GET[:-2] + b"X: " + b"x" * 70_000 + b"\r\n\r\n")
        after = server.client.get("/metrics").text.partition(counter)[2].partition("\n")[0]
        assert float(after) == float(before) + 1

    @pytest.mark.slow
    def test_a_refused_client_that_stays_is_cut_off(self, impatient: LiveServer) -> None:
        num_others = num_connections(impatient)
        with closing(impatient.connect()) as connection:
            send(connection, b"\0")
            assert status_and_code(rest_of(connection)) == (400, "invalid_request_error")
            impatient.wait_until(lambda: num_connections(impatient) <= num_others)


class TestBodies:
    @pytest.mark.parametrize("declared", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
    def test_one_that_does_not_arrive_gets_408(self, impatient: LiveServer, declared: bytes) -> None:
        assert status_and_code(answer_to(impatient, POST + declared)) == (408, "request_timeout")
        impatient.wait_until_idle()

    def test_trailers_are_no_headers(self, server: LiveServer) -> None:
        body = body_of(max_tokens=1)
        chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
        answer = answer_to(server, POST + b"Connection: close\r\n" + chunked + b"X-Request-Id: smuggled\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and b"smuggled" not in answer

    @pytest.mark.parametrize(
        "framing",
        [b"5;" + b"x" * 65_000, b"0\r\nX: " + b"x" * 65_000, b"1\r\n \r\n" * 10_000],
        ids=["ext", "trailer", "crumbs"],
    )
    def test_framing_may_not_outweigh_the_content(self, server: LiveServer, framing: bytes) -> None:
        answer = answer_to(server, POST + b"Transfer-Encoding: chunked\r\n\r\n", *[framing] * 40)
        assert answer == b"" or status_and_code(answer) == (400, "invalid_request_error")
        server.wait_until_idle()

    @pytest.mark.slow
    def test_the_rest_of_a_refused_one_is_not_read_forever(self, server: LiveServer) -> None:
        with closing(server.connect()) as connection:
            send(connection, POST + b"Content-Length: 99999999\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")
            rest_of(connection)  # ends, or the socket's timeout raises

    def test_expect_100_is_answered_before_the_body_and_not_before_a_refusal(self, server: LiveServer) -> None:
        expecting = POST + b"Connection: close\r\nExpect: 100-continue\r\n"
        with closing(server.connect()) as connection:
            body = body_of(max_tokens=1)
            send(connection, expecting + b"Content-Length: %d\r\n\r\n" % len(body))
            assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            send(connection, body)
            assert rest_of(connection).startswith(b"HTTP/1.1 200")
        answer = answer_to(server, expecting + b"Content-Length: 99999999\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413")
