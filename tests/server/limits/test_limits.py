"""Limits of each parameter: a value at the limit is accepted, one beyond is refused with the parameter's name."""

import gc
import json
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from server.anthropic.translate import to_chat
from server.limits.large_bodies import LARGE_BYTES
from server.protocol import messages, structured, wire
from server.protocol.anthropic import MessagesRequest
from server.protocol.chat import ChatRequest
from server.protocol.responses import ResponsesRequest
from server.routes import json_route
from tests.server.events import error_of
from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_CALL


@pytest.mark.parametrize(
    ("param", "limit", "value"),
    [
        ("stop", wire.MAX_STOP_STRINGS, lambda count: ["x"] * count),
        ("stop", wire.MAX_STOP_LENGTH, lambda count: "x" * count),
        ("stop", wire.MAX_STOPS_LENGTH, lambda count: ["x" * 128] * (count // 128) + ["x"] * (count % 128)),
        ("bad_words", wire.MAX_BAD_WORDS, lambda count: ["x"] * count),
        ("bad_words", wire.MAX_BAD_WORD_LENGTH, lambda count: ["x" * count]),
        ("bad_words", wire.MAX_BAD_WORDS_LENGTH, lambda count: ["x" * 128] * (count // 128) + ["x"] * (count % 128)),
        ("stop_token_ids", wire.MAX_STOP_TOKEN_IDS, lambda count: [1] * count),
        ("allowed_token_ids", wire.MAX_ALLOWED_TOKEN_IDS, lambda count: [97] * count),
        ("n", 128, lambda count: count),
        ("prompt", 128, lambda count: ["x"] * count),
        ("cache_salt", 1024, lambda count: "x" * count),
    ],
)
def test_so_much_is_taken_and_one_more_is_refused_by_name(
    server: LiveServer, param: str, limit: int, value: Any
) -> None:
    taken = server.complete(**{"prompt": "Hi", "max_tokens": 1, param: value(limit)})
    assert taken.status_code == 200, taken.text
    if param == "prompt":
        limit = 320  # sequences that the server admits at once
    refused = server.complete(**{"prompt": "Hi", "max_tokens": 1, param: value(limit + 1)})
    assert (refused.status_code, error_of(refused)["param"]) == (400, param)


@pytest.mark.parametrize("field", [{"stop": "x" * 1025}, {"bad_words": ["x" * 257]}], ids=["stop", "bad_words"])
def test_a_text_that_is_too_long_has_characters(server: LiveServer, field: dict[str, Any]) -> None:
    refused = server.complete("Hi", **field)
    assert refused.status_code == 400 and "at most" in refused.text and "characters" in refused.text


ALLOWED = {"allowed_token_ids": [*range(97, 113)] * 9}
BAD = {"bad_words": ["abcd"]}


@pytest.mark.parametrize(
    ("ids", "most", "sequences"),
    [
        (ALLOWED, 32, lambda count: {"prompt": "Hi", "n": count}),
        (ALLOWED, 32, lambda count: {"prompt": ["Hi"] * count}),
        (BAD, 128, lambda count: {"prompt": ["Hi"] * count}),
        (ALLOWED | BAD, 25, lambda count: {"prompt": ["Hi"] * count}),
    ],
    ids=["allowed and n", "allowed and prompts", "bad words and prompts", "both and prompts"],
)
def test_what_is_sent_along_with_all_sequences_is_bounded(
    server: LiveServer, ids: dict[str, Any], most: int, sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.generation.plan.MAX_SENT_IDS", 512)
    taken = server.complete(**ids, **sequences(most), max_tokens=1)
    assert taken.status_code == 200, taken.text
    refused = server.complete(**ids, **sequences(most + 1), max_tokens=1)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "n" if "n" in sequences(1) else "prompt")


@pytest.mark.parametrize(
    ("scores", "param"),
    [
        ({"logprobs": 4, "max_tokens": 5, "n": 4}, "logprobs"),
        ({"prompt_logprobs": 4, "max_tokens": 1, "n": 10}, "prompt_logprobs"),
        ({"prompt_logprobs": 4, "max_tokens": 1, "prompt": [[1, 2]] * 10}, "prompt_logprobs"),
        ({"prompt_logprobs": 4, "logprobs": 4, "max_tokens": 2, "n": 5}, "prompt_logprobs"),
        ({"prompt_logprobs": 4, "logprobs": 4, "max_tokens": 5, "n": 10, "stream": True}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_the_scores_of_a_response_are_bounded(
    server: LiveServer, scores: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [1, 2], "echo": False, **scores}
    monkeypatch.setattr("server.generation.plan.MAX_SCORES", 100)
    assert server.complete(**body).status_code == 200
    monkeypatch.setattr("server.generation.plan.MAX_SCORES", 99)
    refused = server.complete(**body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, param)


TEXT = {"type": "text", "text": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


def parts(count: int, kind: str = "text") -> list[dict[str, Any]]:
    """Returns messages of four parts each, with `count` parts together."""
    return [
        {"role": "user", "content": [{**TEXT, "type": kind}] * min(4, count - begun)} for begun in range(0, count, 4)
    ]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("chat/completions", parts),
        ("chat/completions", lambda count: [{"role": "assistant", "tool_calls": [CALL] * (count - 1)}, *parts(1)]),
        ("responses", lambda count: parts(count, "input_text")),
        ("messages", parts),
        (
            "messages",
            lambda count: [ANTHROPIC_CALL, {"role": "user", "content": [{**RESULT, "content": [TEXT] * (count - 2)}]}],
        ),
        ("messages/count_tokens", parts),
    ],
)
def test_parts_of_all_messages_are_counted_before_they_are_read(
    server: LiveServer, path: str, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.protocol.messages.MAX_PARTS_TOGETHER", 32)
    param, limit = ("input", "max_output_tokens") if path == "responses" else ("messages", "max_tokens")
    taken, refused = (
        server.post_json(f"/v1/{path}", {"model": "fake", param: sent(count), limit: 1}) for count in (32, 33)
    )
    assert taken.status_code == 200, taken.text
    message = f"{param}: Must not have more than 32 parts and tool calls together."
    assert refused.status_code == 400 and refused.json()["error"]["message"] == message


def test_other_lists_are_no_parts(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send back what it got, with the score of every token."""
    monkeypatch.setattr("server.protocol.messages.MAX_PARTS_TOGETHER", 32)
    part = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": [{"token": "Hi"}] * 99}
    answer = {"type": "message", "role": "assistant", "content": [part]}
    sent = {"model": "fake", "input": [answer, {"role": "user", "content": "Go on"}], "max_output_tokens": 1}
    assert server.post_json("/v1/responses", sent).status_code == 200
    known = [{"role": "user", "content": "Hi", "known_to_the_template": [1] * 99}]
    assert server.chat(known, max_tokens=1).status_code == 200


def test_logit_biases_are_counted_before_they_are_read(server: LiveServer) -> None:
    refused = server.complete("Hi", logit_bias={f"no id {each}": "no number" for each in range(1025)})
    message = error_of(refused)["message"]
    assert refused.status_code == 400 and message == "logit_bias: Must not have more than 1024 entries."


def test_so_are_fields(server: LiveServer) -> None:
    fields = {f"unknown_{each}": 1 for each in range(wire.MAX_FIELDS - 1)}
    assert server.complete("Hi", **fields).status_code == 200
    refused = server.complete("Hi", **fields, one_more=1)
    assert refused.status_code == 400 and "257 fields" in error_of(refused)["message"]


@pytest.mark.parametrize("size", [100, 100_000])
class TestJson:
    @pytest.mark.parametrize("start", ["[", '{"a":', '{"prompt":["', '{"prompt": [1,', "1", "-", '"'])
    def test_what_is_cut_off_or_endless_is_refused(self, server: LiveServer, size: int, start: str) -> None:
        refused = server.post("/v1/completions", start * size)
        assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_request_error")

    @pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
    def test_it_is_utf8(self, server: LiveServer, size: int, encoding: str) -> None:
        body = json.dumps({"prompt": "ä" * size}, ensure_ascii=False).encode(encoding)
        assert server.post("/v1/completions", body).status_code == 400

    def test_the_collector_goes_on(self, server: LiveServer, size: int) -> None:
        server.post("/v1/completions", "[" * size)
        server.wait_until(gc.isenabled)

    def test_the_collector_rests_until_a_large_body_is_translated(
        self, server: LiveServer, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = list[bool]()

        def translate(body: MessagesRequest) -> ChatRequest:
            seen.append(gc.isenabled())
            return to_chat(body)

        monkeypatch.setattr("server.routes.anthropic.to_chat", translate)
        messages = [{"role": "user", "content": "Hi"}]
        server.post_json("/v1/messages", {"messages": messages, "max_tokens": 1, "metadata": {"user_id": "x" * size}})
        server.wait_until(gc.isenabled)
        assert seen == [size < LARGE_BYTES]


@pytest.mark.parametrize(("item", "is_taken"), [("[]", False), ("{}", False), ("1", True), (f'"[{"x" * 16}"', True)])
def test_too_many_lists_and_objects_are_refused_unless_they_are_text(
    server: LiveServer, item: str, is_taken: bool
) -> None:
    body = '{"unknown": [' + ",".join([item] * (json_route.MAX_CONTAINERS + 1)) + '], "prompt": "Hi"}'
    refused = server.post("/v1/completions", body)
    assert refused.status_code == (200 if is_taken else 400), refused.text


def test_so_are_names_in_objects(server: LiveServer) -> None:
    names = ",".join(f'"{each:x}":0' for each in range(json_route.MAX_NAMES))
    refused = server.post("/v1/completions", f'{{"prompt": "Hi", "metadata": {{{names}}}}}')
    assert refused.status_code == 400 and "too many names" in error_of(refused)["message"]
    assert server.complete("Hi", metadata={"text": ": " * json_route.MAX_NAMES}).status_code == 400
    assert server.complete("Hi", metadata={"text": (":" + " " * 16) * json_route.MAX_NAMES}).status_code == 200


def test_values_are_counted_in_all_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_VALUES", 32)
    value = {"a": [1, {"b": [{}, [[1] * 5]]}]}
    assert wire.check_size([value, [0] * 18]) is not None
    with pytest.raises(PydanticCustomError):
        wire.check_size([value, [0] * 19])


def function(schema: Any) -> dict[str, Any]:
    return {"name": "f", "parameters": schema}


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    return [{"role": "assistant", "tool_calls": [call]}]


def used(arguments: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": arguments}]}]


@pytest.mark.parametrize(
    ("path", "param", "field"),
    [
        ("chat/completions", "tools", lambda value: [{"type": "function", "function": function(value)}]),
        ("chat/completions", "documents", lambda value: [value]),
        ("chat/completions", "chat_template_kwargs", lambda value: value),
        ("chat/completions", "response_format", lambda value: {"type": "json_schema", "json_schema": named(value)}),
        ("chat/completions", "structured_outputs", lambda value: {"json": value}),
        ("chat/completions", "structured_outputs", lambda value: {"json": json.dumps(value)}),
        ("chat/completions", "messages", called),
        ("responses", "tools", lambda value: [{"type": "function", **function(value)}]),
        ("responses", "chat_template_kwargs", lambda value: value),
        ("responses", "text", lambda value: {"format": {"type": "json_schema", **named(value)}}),
        ("responses", "input", lambda value: [{"type": "function_call", "call_id": "1", **called_item(value)}]),
        ("messages", "tools", lambda value: [{"name": "f", "input_schema": value}]),
        ("messages", "chat_template_kwargs", lambda value: value),
        ("messages", "output_config", lambda value: {"format": {"type": "json_schema", "schema": value}}),
        ("messages", "messages", used),
    ],
)
def test_values_that_are_handed_on_are_counted_before_they_are_read(
    server: LiveServer, path: str, param: str, field: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.protocol.wire.MAX_VALUES", 32)
    monkeypatch.setattr("server.protocol.messages.MAX_VALUES", 32)
    sent = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    sent = {"model": "fake", "input": "Hi"} if path == "responses" else sent
    refused = server.post_json(f"/v1/{path}", {**sent, param: field({"enum": [0] * 34})})
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400 and message.startswith(param) and "more than 32" in message


def named(schema: Any) -> dict[str, Any]:
    return {"name": "f", "schema": schema}


def called_item(arguments: Any) -> dict[str, Any]:
    return {"name": "f", "arguments": json.dumps(arguments)}


@pytest.mark.parametrize(
    ("path", "param", "value"),
    [
        ("chat/completions", "messages", [{"role": "user", "content": "Hi"}] * (messages.MAX_MESSAGES + 1)),
        ("chat/completions", "stream_options", {f"unknown_{each}": 1 for each in range(wire.MAX_FIELDS + 1)}),
        ("chat/completions", "documents", [1, 2]),
        ("chat/completions", "structured_outputs", {"json": " " * (structured.MAX_SCHEMA_CHARS + 1)}),
        ("responses", "include", ["unknown", "unknown"]),
        ("responses", "metadata", {f"name {each}": 1 for each in range(17)}),
    ],
)
def test_only_the_first_of_many_mistakes_is_looked_for(server: LiveServer, path: str, param: str, value: Any) -> None:
    """To describe all of them takes seconds, on the event loop."""
    model = {"chat/completions": ChatRequest, "responses": ResponsesRequest}[path]
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"messages": [{"role": "user", "content": "Hi"}], "input": "Hi", param: value})
    assert caught.value.error_count() == 1
    assert server.post_json(f"/v1/{path}", {"messages": [], "input": "Hi", param: value}).status_code == 400


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
def test_packed_bodies_are_refused_by_name(server: LiveServer, encoding: str) -> None:
    refused = server.complete("Hi", headers={"Content-Encoding": encoding})
    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_media_type")
    assert encoding.lower() in refused.text


def test_a_body_that_says_it_is_not_packed_is_read(server: LiveServer) -> None:
    assert server.complete("Hi", headers={"Content-Encoding": "identity"}).status_code == 200
