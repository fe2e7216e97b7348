from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import SSEParser

line_ends = st.sampled_from(["\n", "\r\n", "\r"])
payloads = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)
comments = st.lists(payloads.map(lambda text: f":{text}"), max_size=2)
events = st.lists(st.tuples(comments, st.lists(payloads, min_size=1, max_size=3)), max_size=5)


def parsed(pieces: Iterable[bytes]) -> list[bytes]:
    parser = SSEParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def split(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


@given(events, line_ends, st.lists(st.integers(min_value=0), max_size=12))
def test_every_event_is_found_however_the_bytes_are_split(
    sent: list[tuple[list[str], list[str]]], line_end: str, cuts: list[int]
) -> None:
    lines = [line for comment, data in sent for line in (*comment, *(f"data: {text}" for text in data), "")]
    stream = "".join(line + line_end for line in lines).encode()
    assert parsed(split(stream, cuts)) == ["\n".join(data).encode() for _, data in sent]


@given(events, st.data())
def test_line_ends_may_be_mixed_and_split_at_every_byte(
    sent: list[tuple[list[str], list[str]]], data: st.DataObject
) -> None:
    # After a line that ended in CR, a blank line that ends in LF alone would read as one CRLF: so none is drawn.
    stream = b""
    for _, texts in sent:
        for line in (*(f"data:{' ' + text}" for text in texts), ""):
            ends = ["\n", "\r\n", "\r"] if line or not stream.endswith(b"\r") else ["\r\n", "\r"]
            stream += (line + data.draw(st.sampled_from(ends))).encode()
    assert parsed(bytes([byte]) for byte in stream) == ["\n".join(texts).encode() for _, texts in sent]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b": ping\n\ndata: a\n\n", [b"a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"event: x\nid: 7\nretry: 5\ndata: a\n\n", [b"a"]),
        (b"dataset: x\n\n", []),
        (b"data\n\n", [b""]),
        (b"data: a: b\n\n", [b"a: b"]),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        ("data: \u2028\u0085\x0b\n\n".encode(), ["\u2028\u0085\x0b".encode()]),
    ],
)
def test_fields_comments_and_line_ends_follow_the_standard(stream: bytes, expected: list[bytes]) -> None:
    assert parsed([stream]) == expected


def test_an_event_without_its_blank_line_is_no_event() -> None:
    assert parsed([b"data: a\n\ndata: b\n"]) == [b"a"]


def test_an_event_is_there_as_soon_as_its_blank_line_is() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: a\r\n\r") == [b"a"]
    assert parser.feed(b"") == []
    assert parser.feed(b"\ndata: b\n\n") == [b"b"]
