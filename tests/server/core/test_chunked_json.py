"""Large lists are encoded in slices, between which the event loop runs other tasks."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.outputs import RequestOutput
from server.chat.blocks import Event
from server.chat.choice import ChatChoice
from server.chat.logprobs import ChatLogprobsFormatter
from server.completions.choice import ChoiceFormatter
from server.completions.logprobs import LogprobsFormatter
from server.core.chunked_json import json_list
from server.generation import logprobs, sse
from server.generation.sse import typed_event
from server.protocol.responses import LOGPROBS
from server.responses.writer import ResponseWriter
from server.routes import completions
from tests.server.events import chunks_of, typed_events_of
from tests.server.live_server import LiveServer

VALUES = st.recursive(
    st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists
)


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=20), st.integers(1, 7))
def test_slices_make_the_whole(values: list[object], slice_size: int) -> None:
    encoded = msgspec.json.encode({"list": asyncio.run(json_list(values, slice_size))})
    assert json.loads(encoded) == {"list": values}


def test_others_run_between_two_slices() -> None:
    made = 0
    seen = []

    def items() -> Iterator[int]:
        nonlocal made
        for number in range(1, 11):
            made = number
            yield number

    async def watch() -> None:
        while made < 10:
            seen.append(made)
            await asyncio.sleep(0)

    async def check() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await json_list(items(), 3)
        await watching

    asyncio.run(check())
    assert seen == [0, 3, 6, 9]


def test_long_answers_are_complete(server: LiveServer) -> None:
    text = "ab" * 5000
    body = server.post_json(
        "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert body == {"count": 10_000, "max_model_len": 512, "tokens": [*text.encode()], "token_strs": [*text]}


PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x" * 94},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def scores_of(body: dict[str, Any]) -> list[Any]:
    scores: list[Any] = (body | body["choices"][0])["prompt_logprobs"]
    return scores


@pytest.mark.parametrize("path", PROMPTS)
def test_the_scores_of_a_prompt_are_the_same_in_a_stream(server: LiveServer, path: str) -> None:
    body = PROMPTS[path] | {"prompt_logprobs": 2, "max_tokens": 1}
    streamed = chunks_of(server.post_json(path, body | {"stream": True}))[0]
    assert scores_of(streamed) == scores_of(server.post_json(path, body).json())


def test_so_are_those_of_an_echo(server: LiveServer) -> None:
    body = {"prompt": "x" * 25, "echo": True, "logprobs": 2, "max_tokens": 1, "seed": 1}
    streamed, whole = (
        chunks_of(server.post_json("/v1/completions", body | {"stream": True}))[0],
        server.post_json("/v1/completions", body).json(),
    )
    assert len(whole["choices"][0]["logprobs"]["top_logprobs"]) == 27
    assert streamed["choices"][0]["logprobs"] == whole["choices"][0]["logprobs"]


ASKED: list[tuple[str, dict[str, Any], type | ModuleType, str]] = [
    *((path, {"prompt_logprobs": 2}, logprobs, "_by_id") for path in PROMPTS),
    ("/v1/completions", {"echo": True, "logprobs": 2}, LogprobsFormatter, "_top"),
    ("/v1/completions", {"logprobs": 2, "max_tokens": 45}, LogprobsFormatter, "_top"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "max_tokens": 45}, ChatLogprobsFormatter, "_entry"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked", "place", "name"), ASKED)
def test_others_run_while_scores_are_encoded(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    asked: dict[str, Any],
    place: object,
    name: str,
    stream: bool,
) -> None:
    made, seen, plain = [0], set[int](), getattr(place, name)

    def counted(*arguments: Any) -> dict[str, Any]:
        made[0] += 1
        return plain(*arguments)

    async def watch() -> None:
        while True:
            seen.add(made[0])
            await asyncio.sleep(0)

    monkeypatch.setattr(place, name, counted)
    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    assert server.post_json(path, PROMPTS[path] | {"max_tokens": 1, "stream": stream} | asked).status_code == 200
    watching.cancel()
    assert made[0] > 10 and {each // 10 for each in seen} >= {*range(made[0] // 10)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 2, "max_tokens": 45}),
        ("/v1/chat/completions", PROMPTS["/v1/chat/completions"] | {"logprobs": True, "max_tokens": 45}),
        ("/v1/responses", {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 2, "max_output_tokens": 45}),
    ],
)
def test_the_scores_of_an_answer_are_encoded_a_few_at_a_time(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    sizes, plain = list[int](), msgspec.json.encode

    def encode(part: Any) -> bytes:
        sizes.extend([len(part)] if isinstance(part, list) and part and isinstance(part[0], dict) else [])
        return plain(part)

    monkeypatch.setattr(
        "server.generation.whole_answer.msgspec", SimpleNamespace(Raw=msgspec.Raw, json=SimpleNamespace(encode=encode))
    )
    answer = server.post_json(path, body).content
    assert sizes == [10, 10, 10, 10, 5]
    assert answer == plain(json.loads(answer))


@pytest.mark.parametrize(
    ("path", "place", "name"),
    [
        ("/v1/completions", completions, "join_outputs"),
        ("/v1/completions", ChoiceFormatter, "format"),
        ("/v1/chat/completions", ChatChoice, "whole"),
    ],
)
def test_others_run_between_the_choices_of_an_answer(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, place: object, name: str
) -> None:
    made, turns, plain = list[object](), set[int](), getattr(place, name)

    def counted(*arguments: Any) -> object:
        made.append(plain(*arguments))
        server.loop.call_soon(lambda: turns.add(len(made)))
        return made[-1]

    monkeypatch.setattr(place, name, counted)
    assert server.post_json(path, PROMPTS[path] | {"n": 5, "max_tokens": 2}).status_code == 200
    assert turns == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_others_run_between_the_last_events(server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, turns = list[str](), set[int]()

    async def encode(event: Mapping[str, Any]) -> bytes:
        encoded.append(event["type"])
        server.loop.call_soon(lambda: turns.add(len(encoded)))
        return typed_event(event)

    monkeypatch.setattr("server.generation.typed_stream.chunked_typed_event", encode)
    body = {"input": "Hi"} if path == "/v1/responses" else {**PROMPTS["/v1/chat/completions"], "max_tokens": 2}
    assert server.post_json(path, {"model": "fake", **body, "stream": True}).status_code == 200
    assert turns >= {len(encoded) - 2, len(encoded) - 1}, encoded


def test_the_scores_of_the_last_events_are_encoded_a_few_at_a_time(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, plain = list[int](), sse._dumps

    def dumps(value: Any) -> str:
        sizes.extend([len(value)] if isinstance(value, list) and "top_logprobs" in value[0] else [])
        return plain(value)

    monkeypatch.setattr(sse, "_dumps", dumps)
    asked = {"input": "Hi", "include": [LOGPROBS], "top_logprobs": 2, "max_output_tokens": 45, "stream": True}
    events = typed_events_of(server.post_json("/v1/responses", {"model": "fake", **asked}))
    assert sizes == [10, 10, 10, 10, 5] * 4  # of the text, of its part, of its item, and of the response
    told = [score for event in events if event["type"].endswith("text.delta") for score in event["logprobs"]]
    assert len(told) == 45
    text, part, item, response = events[-4:]
    assert text["logprobs"] == part["part"]["logprobs"] == item["item"]["content"][0]["logprobs"] == told
    assert response["response"]["output"] == [item["item"]]


def test_others_run_while_a_whole_response_is_put_together(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    added, turns, plain = 0, set[int](), ResponseWriter.add

    def add(writer: ResponseWriter, output: RequestOutput) -> list[Event]:
        nonlocal added
        added += 1
        server.loop.call_soon(lambda: turns.add(added))
        return plain(writer, output)

    monkeypatch.setattr(ResponseWriter, "add", add)
    assert server.post_json("/v1/responses", {"input": "Hi", "max_output_tokens": 5}).status_code == 200
    assert turns == {1, 2, 3, 4, 5}
