"""Whatever bytes a client sends, the connection gets a response or ends, in time; the server goes on and holds
nothing."""

import socket
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import fuzz
from tests.server.live_server import LiveServer

pytestmark = pytest.mark.fuzz

BODY = b'{"prompt": "Hi", "max_tokens": 2}'
REQUEST = (
    b"POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
CHUNKED = REQUEST.replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked").replace(
    BODY, b"%x;ext=1\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(BODY), BODY)
)
PIECES = st.sampled_from(
    [
        *(b"\r\n", b"\r\n\r\n", b"\n", b"\0", b" ", b":", b"\xff", b"HTTP/0.9"),
        *(b"Content-Length: 5\r\n", b"Content-Length: 999999999999\r\n", b"Transfer-Encoding: chunked\r\n"),
        *(b"Expect: 100-continue\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"GET / HTTP/1.1\r\n\r\n"),
        *(b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draws a valid request or two, with pieces put in, taken out or cut off."""
    data = draw(st.sampled_from([REQUEST, CHUNKED, REQUEST + CHUNKED]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(st.sampled_from([0, 0, 1, 5, 50, 10_000]))
        data = data[:start] + draw(PIECES | st.binary(max_size=8)) + data[end:]
    return data


@fuzz(150)
@given(data=st.binary(max_size=300) | mutated(), cut=st.integers(0, 300), closes=st.booleans())
def test_any_bytes_are_survived(server: LiveServer, data: bytes, cut: int, closes: bool) -> None:
    server.engine.reset()
    with closing(server.connect()) as connection, suppress(ConnectionError):
        connection.sendall(data[:cut])
        connection.sendall(data[cut:])
        if not closes:
            with suppress(OSError):  # the server may have hung up by now
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(65536):
                answer += part
            assert answer == b"" or (answer.startswith(b"HTTP/1.1 ") and b" 500 " not in answer[:13])
    server.wait_until_idle()
    assert server.complete("Hi", max_tokens=1).status_code == 200
