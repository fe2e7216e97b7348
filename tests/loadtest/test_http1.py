import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import ProtocolError
from loadtest.http1 import ResponseParser

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def fed(data: bytes, step: int = 1_000_000, at_eof: bool = False) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    body = b"".join(piece for at in range(0, len(data), step) for piece in parser.feed(data[at : at + step]))
    if at_eof:
        parser.feed_eof()
    return parser, body


def chunked(pieces: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces if piece)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


@given(st.lists(st.binary(max_size=40)), st.integers(1, 50), st.sampled_from([b"", b";a=b"]))
def test_a_chunked_body_comes_out_whole_however_it_is_split(pieces: list[bytes], step: int, extension: bytes) -> None:
    parser, body = fed(chunked(pieces, extension, b"Server-Timing: x\r\n"), step)
    assert parser.is_complete
    assert body == b"".join(pieces)


@given(st.binary(max_size=100), st.integers(1, 50))
def test_a_body_of_known_length_ends_with_its_last_byte(body: bytes, step: int) -> None:
    parser, found = fed(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, step)
    assert parser.is_complete
    assert found == body


@given(st.binary(max_size=100), st.integers(1, 50))
def test_a_body_without_length_ends_with_the_connection(body: bytes, step: int) -> None:
    parser, found = fed(HEAD + b"\r\n" + body, step, at_eof=True)
    assert parser.is_complete
    assert found == body


def test_part_of_a_chunk_comes_out_at_once() -> None:
    parser = ResponseParser()
    assert parser.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab") == [b"ab"]
    assert parser.feed(b"cde") == [b"cde"]
    assert not parser.is_complete


def test_header_names_are_lower_case_and_repeated_ones_are_joined() -> None:
    parser, _ = fed(b"HTTP/1.1 404 Not Found\r\nX-A: 1\r\nx-a:2\r\nContent-Length: 0\r\n\r\n")
    assert parser.status == 404
    assert parser.headers["x-a"] == "1, 2"
    assert parser.is_complete


def test_an_informational_response_precedes_the_real_one() -> None:
    parser, body = fed(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + chunked([b"a"]))
    assert (parser.status, body) == (200, b"a")
    assert "link" not in parser.headers


@pytest.mark.parametrize("num_pieces", [1, 100])
@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        HEAD + b"nonsense\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\n\r\nab",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n+5\r\nabcde\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcde\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcXX0\r\n\r\n",
        chunked([b"a"]) + b"more",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(data: bytes, num_pieces: int) -> None:
    with pytest.raises(ProtocolError):
        fed(data, step=-(-len(data) // num_pieces))


@pytest.mark.parametrize("length", [0, 10, len(HEAD), len(chunked([b"abc"])) - 1])
def test_a_connection_that_closes_too_early_is_an_error(length: int) -> None:
    with pytest.raises(ProtocolError, match="connection closed"):
        fed(chunked([b"abc"])[:length], at_eof=True)
