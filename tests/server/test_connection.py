"""What one connection may cost, seen from raw sockets: heads, bodies, pipelines, idle crowds, answers left unread."""

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from server.connection import MAX_PIPELINED
from server.listener import NUM_OTHER_FILES, listen, raise_file_limit
from tests.server.live_server import LiveServer, live_server

GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
FOREVER = 500


def body_of(**parameters: Any) -> bytes:
    return json.dumps({"prompt": "Hi", **parameters}).encode()


def post(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def old(request: bytes) -> bytes:
    return request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)


def answer_to(server: LiveServer, *data: bytes) -> bytes:
    """All that comes back until the server closes."""
    with closing(server.connect()) as connection:
        send(connection, *data)
        return rest_of(connection)


def send(connection: socket.socket, *data: bytes) -> None:
    try:
        for part in data:
            connection.sendall(part)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has heard enough


def rest_of(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def is_open(connection: socket.socket) -> bool:
    """Whether it still answers."""
    send(connection, GET)
    answer = b""
    while not answer.endswith(b"}"):
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return False
        if not part:
            return False
        answer += part
    return answer.startswith(b"HTTP/1.1 200")


def until_brace(connection: socket.socket) -> bytes:
    """An answer, up to the end of its JSON."""
    answer = b""
    while not answer.endswith(b"}}"):
        answer += connection.recv(65536)
    return answer


def num_connections(server: LiveServer) -> int:
    return len(server.server.server_state.connections)


@pytest.fixture(scope="module")
def hasty() -> Iterator[LiveServer]:
    """A server without patience."""
    with live_server(header_timeout=0.2, body_timeout=0.2, stall_timeout=0.3, max_connections=8) as running:
        yield running


class TestOldClients:
    """Of HTTP/1.0, to which no chunk may be sent."""

    def test_a_stream_ends_with_its_connection(self, server: LiveServer) -> None:
        head, _, body = answer_to(server, old(post(body_of(stream=True)))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head and b"transfer-encoding" not in head
        assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")

    @pytest.mark.parametrize("request_", [GET, post(body_of()), post(body_of(n=0))])
    def test_what_has_a_length_is_told_with_it(self, server: LiveServer, request_: bytes) -> None:
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

    def test_who_says_nothing_is_cut_off_without_a_word(self, hasty: LiveServer) -> None:
        assert answer_to(hasty) == b""

    @pytest.mark.parametrize("head", [b"G", GET[:-2], b"\r\n", b"\r\n\r\n\r\n"])
    def test_a_head_that_does_not_end_is_cut_off(self, hasty: LiveServer, head: bytes) -> None:
        answer = answer_to(hasty, head)
        assert answer == b"" if head.isspace() else status_and_code(answer) == (408, "request_timeout")

    def test_also_on_a_connection_that_was_used(self, hasty: LiveServer) -> None:
        with closing(hasty.connect()) as connection:
            assert is_open(connection) and is_open(connection)
            send(connection, b"GET /vers")
            assert status_and_code(rest_of(connection)) == (408, "request_timeout")

    def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut_off(self, hasty: LiveServer) -> None:
        hasty.engine.reset()
        hasty.engine.delay_s = 0.05
        assert hasty.complete("Hi", max_tokens=10).json()["usage"]["completion_tokens"] == 10

    def test_what_is_refused_before_it_is_a_request_is_counted(self, server: LiveServer) -> None:
        counter = 'twostep_rejections_total{reason="headers_too_large"} '
        before = server.client.get("/metrics").text.partition(counter)[2].partition("\n")[0] or "0"
        answer_to(server, GET[:-2] + b"X: " + b"x" * 70_000 + b"\r\n\r\n")
        after = server.client.get("/metrics").text.partition(counter)[2].partition("\n")[0]
        assert float(after) == float(before) + 1

    def test_who_was_refused_and_stays_is_cut_off(self, hasty: LiveServer) -> None:
        num_others = num_connections(hasty)
        with closing(hasty.connect()) as connection:
            send(connection, b"\0")
            assert status_and_code(rest_of(connection)) == (400, "invalid_request_error")
            hasty.wait_until(lambda: num_connections(hasty) <= num_others)


class TestBodies:
    @pytest.mark.parametrize("declared", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
    def test_one_that_does_not_come_is_told_408(self, hasty: LiveServer, declared: bytes) -> None:
        assert status_and_code(answer_to(hasty, POST + declared)) == (408, "request_timeout")
        hasty.wait_until_idle()

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

    def test_the_rest_of_a_refused_one_is_not_read_forever(self, server: LiveServer) -> None:
        with closing(server.connect()) as connection:
            send(connection, POST + b"Content-Length: 99999999\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")
            assert rest_of(connection) is not None  # ends

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


class TestPipelines:
    @pytest.mark.parametrize("stream", [False, True])
    def test_who_leaves_aborts_also_the_one_before_the_last(self, server: LiveServer, stream: bool) -> None:
        server.engine.hold_at = 3
        with closing(server.connect()) as connection:
            send(connection, post(body_of(stream=stream)))
            server.wait_until(lambda: server.engine.num_holding == 1)
            send(connection, GET)
        server.wait_until_idle()

    def test_a_few_are_answered_in_order(self, server: LiveServer) -> None:
        count = MAX_PIPELINED
        answer = answer_to(server, GET * (count - 1) + GET[:-2] + b"Connection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200") == count

    def test_more_are_cut_off_and_free_what_they_held(self, server: LiveServer) -> None:
        server.engine.hold_at = 3
        with closing(server.connect()) as connection:
            send(connection, post(body_of(stream=True)))
            server.wait_until(lambda: server.engine.num_holding == 1)
            send(connection, *[GET * 100] * 100)
            server.wait_until_idle()

    def test_so_is_a_large_body_behind_a_running_request(self, server: LiveServer) -> None:
        server.engine.hold_at = 3
        with closing(server.connect()) as connection:
            send(connection, post(body_of(stream=True)))
            server.wait_until(lambda: server.engine.num_holding == 1)
            send(connection, post(b" " * 2**20))
            server.wait_until_idle()


class TestCrowds:
    def test_who_asks_for_nothing_makes_room(self, hasty: LiveServer) -> None:
        with ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(closing(hasty.connect()))
                assert hasty.complete("Hi", max_tokens=1).status_code == 200
            hasty.wait_until(lambda: num_connections(hasty) <= 8)

    def test_who_waits_for_an_answer_keeps_the_place_and_others_are_told_503(self) -> None:
        with live_server(max_connections=4) as server, ExitStack() as stack:
            server.engine.hold_at = 0
            busy = [stack.enter_context(closing(server.connect())) for _ in range(4)]
            for connection in busy:
                send(connection, post(body_of(max_tokens=2)))
            server.wait_until(lambda: server.engine.num_holding == 4)
            answer = answer_to(server, GET)
            assert status_and_code(answer) == (503, "server_is_overloaded") and b"retry-after" in answer
            server.engine.hold_at = None
            assert all(connection.recv(100).startswith(b"HTTP/1.1 200") for connection in busy)

    def test_the_longest_idle_goes_first(self) -> None:
        with live_server(max_connections=3) as server, ExitStack() as stack:
            first, second = (stack.enter_context(closing(server.connect())) for _ in range(2))
            assert is_open(first) and is_open(second) and is_open(first)
            third = stack.enter_context(closing(server.connect()))
            assert is_open(third)
            fourth = stack.enter_context(closing(server.connect()))
            assert is_open(fourth) and is_open(first) and is_open(third)
            assert not is_open(second)

    def test_a_process_out_of_files_says_503_and_goes_on(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        script = (
            f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {NUM_OTHER_FILES + 10}))\n"
            "from server.listener import raise_file_limit\n"
            "print(raise_file_limit(4096), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
        )
        root = Path(__file__).resolve().parents[2]
        told = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
        assert told.stdout.split() == ["10", str(NUM_OTHER_FILES + 10)] and "10 connections" in told.stderr
        assert raise_file_limit(5) == 5
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


class TestReaders:
    def test_an_answer_that_nobody_reads_is_dropped(self, hasty: LiveServer) -> None:
        """Not a stream: it is all in the server's buffer, and its request has long ended."""
        hasty.engine.reset()
        num_others = num_connections(hasty)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", hasty.port))
            send(connection, post(body_of(max_tokens=FOREVER, n=64, logprobs=20)))
            hasty.wait_until(lambda: len(hasty.engine.finished) == 64)
            hasty.wait_until_idle()
            hasty.wait_until(lambda: num_connections(hasty) <= num_others)

    def test_connections_notice_a_vanished_client(self) -> None:
        with closing(listen("127.0.0.1", 0, 7.5)) as listener, closing(socket.socket()) as client:
            client.connect(listener.getsockname())
            with closing(listener.accept()[0]) as accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def test_a_slow_upload_does_not_outlive_the_server() -> None:
    with live_server(shutdown_timeout=0.1) as server, closing(server.connect()) as connection:
        send(connection, POST + b"Content-Length: 100\r\n\r\n{")
        server.wait_until(lambda: server.context.lifecycle.num_under_way == 1)
        server.call(server.server._on_signal)
        assert status_and_code(rest_of(connection)) == (503, "server_is_overloaded")
