"""Streams of typed events, and of lines, go on on another server when theirs is killed, as if nothing had happened."""

import signal
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from server.routing.continuation import LINE_PATHS, Events
from server.routing.line_continuation import LineContinuation
from server.routing.pointed_continuation import PointedContinuation
from server.routing.typed_continuation import TypedContinuation
from tests.server.events import json_lines_of, timeless, typed_events_of
from tests.soak.server import ServerProcess, running_server

NO_DRAFTS = ("--num-speculative-tokens", "0")  # with which a step's events are those of one token, always
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "f", "parameters": CITY, "strict": False}
WHO = [{"role": "user", "content": "Who are you?"}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/responses",
        {"input": "def main(", "max_output_tokens": 60, "temperature": 0.9, "presence_penalty": 0.5, "seed": 0},
    ),
    ("/v1/messages", {"messages": WHO, "max_tokens": 60, "ignore_eos": True, "seed": 1}),
    ("/v1/responses", {"seed": 2, "input": "x", "tools": [FUNCTION], "tool_choice": "required"}),
    (
        "/v1/messages",
        {
            "messages": WHO,
            "max_tokens": 60,
            "seed": 3,
            "tools": [{"name": "f", "input_schema": CITY}],
            "tool_choice": {"type": "any"},
        },
    ),
    ("/api/chat", {"messages": [{"role": "user", "content": "def main("}], "options": {"num_predict": 60, "seed": 4}}),
    (
        "/api/generate",
        {"prompt": "def main(", "raw": True, "options": {"num_predict": 60, "temperature": 0.9, "seed": 5}},
    ),
]


def sending(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    return httpx.stream("POST", server.url + path, json=body, headers={"X-Request-Id": "one"}, timeout=60)


def whole(server: ServerProcess, path: str, body: dict[str, Any]) -> bytes:
    with sending(server, path, body) as response:
        return bytes(response.read())


def continuation(path: str, body: dict[str, Any]) -> PointedContinuation:
    return LineContinuation(body) if path in LINE_PATHS else TypedContinuation(body)


def taken(stream: PointedContinuation, events: Iterable[bytes]) -> bytes:
    return b"".join(new + stream.separator for event in events if (new := stream.take(event)) is not None)


def events_of(path: str, data: bytes) -> list[dict[str, Any]]:
    """Returns the events without times, and without what was cached: they are read on different servers."""
    response = httpx.Response(200, content=data)
    if path in LINE_PATHS:
        return list(timeless(json_lines_of(response)))
    events: list[dict[str, Any]] = timeless(typed_events_of(response))
    for usage in [event[name].get("usage") for event in events for name in ("response", "message") if name in event]:
        for name in [name for name in usage or () if name not in ("output_tokens", "total_tokens")]:
            del usage[name]
    return events


@pytest.mark.slow
def test_streams_of_a_server_that_is_killed_go_on_on_another() -> None:
    asked = [(path, body | {"stream": True}) for path, body in ASKED]
    streams = [continuation(*each) for each in asked]
    with ExitStack() as stack:
        first, second = (stack.enter_context(running_server(*NO_DRAFTS)) for _ in range(2))
        expected = [events_of(path, whole(second, path, body)) for path, body in asked]
        got = []
        for (path, _), stream in zip(asked, streams, strict=True):
            response = stack.enter_context(sending(first, path, stream.next_body()))
            events, data, beginning = Events(stream.separator), response.iter_raw(), b""
            while beginning.count(stream.separator) < 8:
                beginning += taken(stream, events.split(next(data)))
            got.append(beginning)
        first.signal_all(signal.SIGKILL)
        for index, (stream, (path, _)) in enumerate(zip(streams, asked, strict=True)):
            assert stream.has_begun and not stream.is_done
            got[index] += taken(stream, Events(stream.separator).split(whole(second, path, stream.next_body())))
    assert [events_of(path, data) for (path, _), data in zip(asked, got, strict=True)] == expected
