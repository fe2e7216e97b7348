"""Large answers are written as they are made; the bytes are those of one piece."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.generation import whole_answer
from server.generation.whole_answer import json_pieces
from tests.server.live_server import LiveServer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=40,
)
LARGE = {"prompt": ["x" * 94] * 3, "prompt_logprobs": 2, "max_tokens": 1, "seed": 1}


def with_iterators(value: Any) -> Any:
    """Returns the value with iterators for its lists."""
    if isinstance(value, dict):
        return {name: with_iterators(each) for name, each in value.items()}
    return iter(value) if isinstance(value, list) else value


@given(VALUES)
def test_pieces_are_the_whole(value: Any) -> None:
    expected = msgspec.json.encode(value)
    assert b"".join(json_pieces(value)) == expected
    assert b"".join(json_pieces(with_iterators(value))) == expected


def test_a_piece_has_one_choice_or_a_few_items() -> None:
    choices = [{"index": index, "tokens": [1, 2]} for index in range(5)]
    assert len([*json_pieces({"choices": choices})]) == 6
    made = list[int]()

    def items() -> Iterator[int]:
        for item in range(100):
            made.append(item)
            yield item

    pieces = json_pieces({"items": items()})
    for count in (10, 20, 30):
        next(pieces)
        assert len(made) == count
    assert len([*json_pieces({"items": items()}, 1)]) == 101


def lengths(answer: httpx.Response) -> tuple[bool, bool]:
    return "content-length" in answer.headers, answer.headers.get("transfer-encoding") == "chunked"


def test_only_large_answers_have_no_length(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = server.post_json("/v1/completions", LARGE)
    monkeypatch.setattr(whole_answer, "WHOLE_BYTES", 1000)
    pieces = server.post_json("/v1/completions", LARGE)
    assert (lengths(whole), lengths(pieces)) == ((True, False), (False, True))
    assert pieces.json()["choices"] == whole.json()["choices"]
    assert pieces.headers["x-prompt-tokens"] == whole.headers["x-prompt-tokens"]


def test_an_answer_that_nobody_reads_is_not_made(
    impatient: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some hundred kilobytes are on their way: what the sockets hold. The rest waits to be made until the connection is
    closed."""
    made, plain = [0], whole_answer.json_pieces

    def large_pieces(*answer: Any) -> Iterator[bytes]:
        yield from plain(*answer)
        while made[0] < 1000:
            made[0] += 1
            yield b" " * 2**16

    monkeypatch.setattr(whole_answer, "json_pieces", large_pieces)
    body = json.dumps(LARGE).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    with caplog.at_level(logging.WARNING), socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        deadline_s = time.monotonic() + 60
        while "stopped reading" not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert "the client stopped reading; its answer is cut off" in caplog.text
    assert 0 < made[0] < 900
    impatient.wait_until_idle()
