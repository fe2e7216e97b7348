"""Streams of typed events go on on another server when theirs is killed, as if nothing had happened."""

import signal
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from server.routing.continuation import Events
from server.routing.typed_continuation import TypedContinuation
from tests.server.events import timeless, typed_events_of
from tests.soak.server import ServerProcess, running_server

NO_DRAFTS = ("--num-speculative-tokens", "0")  # with which a step's events are those of one token, always
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "f", "parameters": CITY, "strict": False}
WHO = [{"role": "user", "content": "Who are you?"}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "def main(", "max_output_tokens": 60, "temperature": 0.9, "presence_penalty": 0.5}),
    ("/v1/messages", {"messages": WHO, "max_tokens": 60, "ignore_eos": True}),
    ("/v1/responses", {"input": "x", "tools": [FUNCTION], "tool_choice": "required"}),
    (
        "/v1/messages",
        {
            "messages": WHO,
            "max_tokens": 60,
            "tools": [{"name": "f", "input_schema": CITY}],
            "tool_choice": {"type": "any"},
        },
    ),
]


def sending(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    return httpx.stream("POST", server.url + path, json=body, headers={"X-Request-Id": "one"}, timeout=60)


def whole(server: ServerProcess, path: str, body: dict[str, Any]) -> bytes:
    with sending(server, path, body) as response:
        return bytes(response.read())


def taken(stream: TypedContinuation, events: list[bytes]) -> bytes:
    return b"".join(new + b"\n\n" for event in events if (new := stream.take(event)) is not None)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Returns the events without times, and without what was cached: they are read on different servers."""
    events: list[dict[str, Any]] = timeless(typed_events_of(httpx.Response(200, content=data)))
    for usage in [event[name].get("usage") for event in events for name in ("response", "message") if name in event]:
        for name in [name for name in usage or () if name not in ("output_tokens", "total_tokens")]:
            del usage[name]
    return events


@pytest.mark.slow
def test_streams_of_a_server_that_is_killed_go_on_on_another() -> None:
    asked = [(path, body | {"stream": True, "seed": number}) for number, (path, body) in enumerate(ASKED)]
    streams = [TypedContinuation(body) for _, body in asked]
    with ExitStack() as stack:
        first, second = (stack.enter_context(running_server(*NO_DRAFTS)) for _ in range(2))
        expected = [events_of(whole(second, *each)) for each in asked]
        got = []
        for (path, _), stream in zip(asked, streams, strict=True):
            response = stack.enter_context(sending(first, path, stream.next_body()))
            events, data, beginning = Events(), response.iter_raw(), b""
            while beginning.count(b"event: ") < 8:
                beginning += taken(stream, list(events.split(next(data))))
            got.append(beginning)
        first.signal_all(signal.SIGKILL)
        for index, (stream, (path, _)) in enumerate(zip(streams, asked, strict=True)):
            assert stream.has_begun and not stream.is_done
            got[index] += taken(stream, list(Events().split(whole(second, path, stream.next_body()))))
    assert [events_of(each) for each in got] == expected
