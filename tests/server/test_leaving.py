"""Clients that leave, or stop reading, free what their request holds: at once, at every stage."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.request import FinishReason
from tests.server.events import chunks_of
from tests.server.live_server import LiveServer, live_server

FOREVER = 500


def send_request(server: LiveServer, **parameters: Any) -> socket.socket:
    """A connection with the request sent and nothing read."""
    connection = server.connect()
    body = json.dumps({"prompt": "Hi", "max_tokens": FOREVER, **parameters}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_first_token_aborts(server: LiveServer, n: int, stream: bool) -> None:
    server.engine.hold_at = 0
    connection = send_request(server, n=n, stream=stream)
    server.wait_until(lambda: server.engine.num_live == n)
    connection.close()
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT] * n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_between_tokens_aborts(server: LiveServer, n: int, stream: bool) -> None:
    server.engine.hold_at = 5
    connection = send_request(server, n=n, stream=stream)
    if stream:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    server.wait_until(lambda: server.engine.num_live == n)
    connection.close()
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT] * n


@pytest.mark.parametrize("n", [1, 3])
def test_who_leaves_in_full_flow_aborts(server: LiveServer, n: int) -> None:
    server.engine.delay_s = 0.001
    connection = send_request(server, stream=True, n=n)
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    server.wait_until_idle()
    assert FinishReason.ABORT in server.engine.finished


def test_who_leaves_while_sending_the_body_asks_for_nothing(server: LiveServer) -> None:
    connection = server.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    connection.sendall(b"Content-Length: 100\r\n\r\n{")
    server.wait_until(lambda: server.context.lifecycle.num_under_way == 1)
    connection.close()
    server.wait_until_idle()
    assert server.engine.requests == []


def stalled(server: LiveServer) -> socket.socket:
    """A client that asks for much and reads nothing, so that the server's send cannot go on."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": "Hi", "max_tokens": FOREVER, "stream": True, "n": 32, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    connection.sendall(head + str(len(body)).encode() + b"\r\n\r\n" + body)
    return connection


def test_a_stalled_reader_that_hangs_up_frees_everything(server: LiveServer) -> None:
    """More is generated than any socket buffers, so the server hangs in its send when the client goes."""
    server.engine.hold_at = FOREVER - 1
    connection = stalled(server)
    server.wait_until(lambda: server.engine.num_holding == 32)
    connection.close()
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT] * 32


def test_a_stalled_reader_that_stays_is_ended() -> None:
    with live_server(stall_timeout=0.2) as server:
        server.engine.hold_at = FOREVER - 1
        connection = stalled(server)
        server.wait_until(lambda: server.engine.num_live == 32)
        server.wait_until_idle()
        assert server.engine.finished == [FinishReason.ABORT] * 32
        connection.close()


def test_a_pause_shorter_than_the_limit_loses_nothing(server: LiveServer) -> None:
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "Hi", "max_tokens": FOREVER, "stream": True, "n": 8}
    ) as response:
        server.wait_until(lambda: server.engine.num_live == 0)
        response.read()
    assert len(chunks_of(response)) == 8 * FOREVER


def test_many_streams_at_once_keep_apart(server: LiveServer) -> None:
    server.engine.delay_s = 0.001
    texts: dict[int, str] = {}

    def run(number: int) -> None:
        response = server.complete(f"prompt {number}", temperature=0, max_tokens=20, stream=True)
        texts[number] = "".join(chunk["choices"][0]["text"] for chunk in chunks_of(response))

    in_threads(run, 64)
    server.engine.delay_s = 0.0
    for number in range(64):
        alone = server.complete(f"prompt {number}", temperature=0, max_tokens=20).json()
        assert texts[number] == alone["choices"][0]["text"]


def test_half_of_many_leave_and_the_others_get_all(server: LiveServer) -> None:
    server.engine.delay_s = 0.001
    complete: list[int] = []

    def run(number: int) -> None:
        if number % 2:
            connection = send_request(server, stream=True)
            connection.recv(1000)
            connection.close()
        else:
            complete.append(len(chunks_of(server.complete("Hi", max_tokens=30, stream=True))))

    in_threads(run, 32)
    server.wait_until_idle()
    assert complete == [30] * 16
    assert server.engine.finished.count(FinishReason.LENGTH) == 16


def in_threads(run: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
