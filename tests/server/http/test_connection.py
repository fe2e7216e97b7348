"""Limits of one connection, tested over raw sockets: pipelines, idle connections, unread responses, slow uploads."""

import gc
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from server.http.connection import MAX_PIPELINED
from server.listener import NUM_OTHER_FILES, listen, raise_file_limit
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
from tests.server.live_server import LiveServer, live_server

FOREVER = 500


class TestPipelines:
    @pytest.mark.parametrize("stream", [False, True])
    def test_leaving_aborts_also_the_request_before_the_last(self, server: LiveServer, stream: bool) -> None:
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
    def test_idle_connections_are_replaced(self, impatient: LiveServer) -> None:
        with ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(closing(impatient.connect()))
                assert impatient.complete("Hi", max_tokens=1).status_code == 200
            impatient.wait_until(lambda: num_connections(impatient) <= 8)

    def test_busy_connections_stay_and_new_ones_get_503(self) -> None:
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

    def test_a_low_limit_of_open_files_allows_fewer_connections(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        script = (
            f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {NUM_OTHER_FILES + 10}))\n"
            "from server.listener import raise_file_limit\n"
            "print(raise_file_limit(4096), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
        )
        root = Path(__file__).resolve().parents[3]
        done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["10", str(NUM_OTHER_FILES + 10)] and "10 connections" in done.stderr
        assert raise_file_limit(5) == 5
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


class TestUnreadRefusals:
    """A client that closes before its refusal is written resets the connection, which is not logged as an error."""

    def test_after_what_is_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        with live_server() as server:
            with standing_still(server), closing(server.connect()) as connection:
                send(connection, b"\0\r\n\r\n")
            assert_all_are_gone_in_silence(server, caplog)

    def test_beyond_the_limit(self, caplog: pytest.LogCaptureFixture) -> None:
        with live_server(max_connections=1) as server, closing(server.connect()) as busy:
            server.engine.hold_at = 0
            send(busy, post(body_of(max_tokens=2)))
            server.wait_until(lambda: server.engine.num_holding == 1)
            with standing_still(server):
                server.connect().close()
            server.engine.hold_at = None
            assert busy.recv(100).startswith(b"HTTP/1.1 200")
            busy.close()
            assert_all_are_gone_in_silence(server, caplog)

    def test_while_the_server_ends(self, caplog: pytest.LogCaptureFixture) -> None:
        with live_server() as server, closing(server.connect()) as connection:
            send(connection, POST + b"Content-Length: 100\r\n\r\n{")
            server.wait_until(lambda: server.context.lifecycle.num_under_way == 1)
            with standing_still(server):
                connection.close()
                for each in list(server.server.server_state.connections):
                    server.call(each.shutdown)
            assert_all_are_gone_in_silence(server, caplog)


@contextmanager
def standing_still(server: LiveServer) -> Generator[None, None, None]:
    """Blocks the server's event loop: it sees only at the end what happens meanwhile."""
    has_begun, is_over = threading.Event(), threading.Event()
    server.call(has_begun.set)
    server.call(is_over.wait)
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()


def assert_all_are_gone_in_silence(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.wait_until(lambda: num_connections(server) == 0)
    gc.collect()  # an exception that was never retrieved is logged when its task is collected
    assert caplog.records == []


class TestReaders:
    def test_an_unread_response_is_dropped(self, impatient: LiveServer) -> None:
        """The response is no stream: all of it is in the server's buffer, and its request has long ended."""
        impatient.engine.reset()
        num_others = num_connections(impatient)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", impatient.port))
            send(connection, post(body_of(max_tokens=FOREVER, n=64, logprobs=20)))
            impatient.wait_until(lambda: len(impatient.engine.finished) == 64)
            impatient.wait_until_idle()
            impatient.wait_until(lambda: num_connections(impatient) <= num_others)

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
