"""Clients that leave, or stop reading, free what their request holds: at once, at every stage."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

import httpx
import pytest

from engine.core.request import FinishReason
from engine.grammar.checker import GrammarChecker
from server.http.connection import WRITE_BUFFER_BYTES
from server.limits.large_bodies import LARGE_BYTES
from server.templates.render import MAX_ISOLATED
from tests.server.byte_tokenizer import ByteTokenizer
from tests.server.events import chunks_of
from tests.server.live_server import TIMEOUT_S, LiveServer, live_server
from tests.server.metrics.published_metrics import advance

FOREVER = 500
MUCH = {"prompt": "Hi", "max_tokens": FOREVER, "stream": True, "n": 32, "logprobs": 20}  # more than sockets hold


def send_request(server: LiveServer, **parameters: Any) -> socket.socket:
    """Sends a request and returns its connection, from which nothing is read yet."""
    connection = server.connect()
    body = json.dumps({"prompt": "Hi", "max_tokens": FOREVER, **parameters}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts(server: LiveServer, n: int, stream: bool) -> None:
    server.engine.hold_at = 0
    connection = send_request(server, n=n, stream=stream)
    server.wait_until(lambda: server.engine.num_live == n)
    connection.close()
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT] * n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_between_tokens_aborts(server: LiveServer, n: int, stream: bool) -> None:
    server.engine.hold_at = 5
    connection = send_request(server, n=n, stream=stream)
    if stream:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    server.wait_until(lambda: server.engine.num_live == n)
    connection.close()
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT] * n


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_in_full_flow_aborts(server: LiveServer, n: int) -> None:
    server.engine.delay_s = 0.001
    connection = send_request(server, stream=True, n=n)
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    server.wait_until_idle()
    assert FinishReason.ABORT in server.engine.finished


@pytest.mark.parametrize("length", [100, LARGE_BYTES])
@pytest.mark.parametrize("part", [b"", b"{"])
def test_leaving_while_sending_the_body_starts_nothing(server: LiveServer, length: int, part: bytes) -> None:
    def act() -> None:
        connection = server.connect()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (length, part))
        server.wait_until(lambda: server.context.lifecycle.num_under_way == 1)
        connection.close()
        server.wait_until_idle()

    assert num_departures(server, "/v1/completions", act) == 1
    assert server.engine.requests == []


MESSAGES = [{"role": "user", "content": "Hi"}]
PLANNED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Hi", "raw": True},
    "/v1/embeddings": {"input": "Hi"},
    "/api/embed": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
}


@pytest.mark.parametrize("path", PLANNED)
def test_leaving_while_the_prompt_is_made_ends_the_request(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def encode(*_: object) -> list[int]:
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        return [1]

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    assert num_departures(server, path, lambda: ask_and_leave(server, path, PLANNED[path], begun)) == 1
    go_on.set()
    assert server.engine.requests == []


def test_leaving_while_the_template_renders_ends_that(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr("server.templates.render.render_isolated", hanging(begun, ended))
    path, body = "/v1/chat/completions", {"messages": MESSAGES, "chat_template": "x"}
    with live_server(trust_request_chat_template=True) as server:
        for _ in range(MAX_ISOLATED + 1):  # a process that went on would leave none for the last one
            begun.clear()
            assert num_departures(server, path, lambda: ask_and_leave(server, path, body, begun)) == 1
            assert ended.is_set()


def test_leaving_while_the_grammar_is_checked_ends_that(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(GrammarChecker, "check", hanging(begun, ended))
    path, body = "/v1/completions", {"prompt": "Hi", "structured_outputs": {"regex": "a"}}
    assert num_departures(server, path, lambda: ask_and_leave(server, path, body, begun)) == 1
    assert ended.is_set()


def hanging(begun: threading.Event, ended: threading.Event) -> Callable[..., Coroutine[Any, Any, None]]:
    """Returns a function that never ends unless it is cancelled."""

    async def work(*_: object) -> None:
        begun.set()
        try:
            await asyncio.Future()
        finally:
            ended.set()

    return work


def ask_and_leave(server: LiveServer, path: str, body: dict[str, Any], begun: threading.Event) -> None:
    with closing(server.connect()) as connection:
        connection.sendall(server.request_bytes(path, body))
        assert begun.wait(TIMEOUT_S)
    server.wait_until_idle()


def num_departures(server: LiveServer, path: str, act: Callable[[], None]) -> float:
    """Returns how many requests are counted as given up by their clients while `act` runs."""
    return advance(server, act)("twostep_http_requests_total", handler=path, method="POST", status="499")


def stalled(server: LiveServer) -> socket.socket:
    """Returns the connection of a client that asks for much and reads nothing, so that the server's send blocks."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps(MUCH).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    connection.sendall(head + str(len(body)).encode() + b"\r\n\r\n" + body)
    return connection


def num_generated(server: LiveServer) -> int:
    """Returns the number of tokens of all live sequences."""
    return sum(len(sequence.token_ids) for sequence in list(server.engine.live))


class StandsStill:
    """Whether the engine's sequences have got no token for a while, since no output of theirs is read."""

    def __init__(self, server: LiveServer, num_live: int) -> None:
        self._server = server
        self._num_live = num_live
        self._num_generated = 0
        self._num_looks = 0

    def __call__(self) -> bool:
        before, self._num_generated = self._num_generated, num_generated(self._server)
        is_same = self._server.engine.num_live == self._num_live and self._num_generated == before > 0
        self._num_looks = self._num_looks + 1 if is_same else 0
        return self._num_looks > 50


def test_a_stalled_reader_that_hangs_up_frees_everything(server: LiveServer) -> None:
    """More is generated than sockets buffer, so the server blocks in its send when the client goes. What nobody reads
    does not pile up before that."""
    server.engine.hold_at = FOREVER - 1
    connection = stalled(server)
    server.wait_until(StandsStill(server, num_live=32))
    assert num_generated(server) < 32 * FOREVER // 4
    unsent = [each.transport.get_write_buffer_size() for each in list(server.server.server_state.connections)]
    assert 0 < max(unsent) < 2 * WRITE_BUFFER_BYTES  # of 21 log-probabilities, an event takes less than the limit
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
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    with (
        httpx.Client(base_url=server.client.base_url, transport=small, timeout=TIMEOUT_S) as client,
        client.stream("POST", "/v1/completions", json=MUCH) as response,
    ):
        server.wait_until(StandsStill(server, num_live=32))
        response.extensions["network_stream"].get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20
        )
        response.read()
    assert len(chunks_of(response)) == 32 * FOREVER


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
