"""Tool calls in chat: how responses contain them, and which settings decide how they are parsed."""

import json
import re
from typing import Any

import pytest
from openai import OpenAI

from tests.server.events import chunks_of, error_of, first
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import saying_tokens
from tests.server.tools.tool_chats import (
    CALL,
    GOLDEN,
    HERMES,
    MARKS,
    ONLY_TIME,
    TOOLS,
    TURNS,
    calls_in,
    exact_bytes,
)

CALLS = "Let me see.\n" + CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'

# What responses contain.


def test_calls_are_separated_from_content(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    choice = first(hermes.chat(tools=TOOLS).json())
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see.\n"
    assert calls_in(choice["message"]) == [("get_weather", '{"city": "Zürich"}'), ("get_time", "{}")]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


def test_content_beside_nothing_but_calls_is_null(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    assert first(hermes.chat(tools=TOOLS).json())["message"]["content"] is None


def test_marks_that_are_no_special_tokens_are_read_too(hermes: LiveServer) -> None:
    hermes.engine.rule = saying(CALL)
    assert len(first(hermes.chat(tools=TOOLS).json())["message"]["tool_calls"]) == 1


def test_a_call_that_max_tokens_cuts_off_ends_with_length(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    choice = first(hermes.chat(tools=TOOLS, max_tokens=50).json())
    assert choice["finish_reason"] == "length"
    assert calls_in(choice["message"])[0][1].startswith('{"ci')


def test_a_stop_string_cuts_a_call_off(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    choice = first(hermes.chat(tools=TOOLS, stop="Zü").json())
    assert choice["finish_reason"] == "stop"
    assert (choice["stop_reason"], calls_in(choice["message"])) == ("Zü", [("get_weather", '{"city": "')])


def test_only_one_call_is_returned_where_one_was_asked_for(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    message = first(hermes.chat(tools=TOOLS, parallel_tool_calls=False).json())["message"]
    assert [name for name, _ in calls_in(message)] == ["get_weather"]


@pytest.mark.parametrize("choice", ["none", ONLY_TIME])
def test_text_that_looks_like_a_call_of_what_may_not_be_called_is_content(hermes: LiveServer, choice: Any) -> None:
    hermes.engine.rule = saying(CALL)
    body = hermes.chat(tools=TOOLS, tool_choice=choice).json()
    assert first(body)["message"]["content"] == CALL and first(body)["finish_reason"] == "stop"


def test_without_tools_nothing_is_a_call(hermes: LiveServer) -> None:
    hermes.engine.rule = saying(CALL)
    assert first(hermes.chat().json())["message"]["content"] == CALL


def test_marks_are_shown_only_where_they_are_looked_for(hermes: LiveServer) -> None:
    for parameters in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}):
        hermes.chat(**parameters)
    shown = [request.params.shown_token_ids for request in hermes.engine.requests]
    assert shown == [(), (), (MARKS["<tool_call>"], MARKS["</tool_call>"])]


def test_each_choice_has_its_own_calls(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)
    choices = hermes.chat(tools=TOOLS, n=3).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_ids_of_calls_are_those_of_the_request(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALL)

    def id_of(request_id: str) -> str:
        message = first(hermes.chat(tools=TOOLS, headers={"X-Request-Id": request_id}).json())["message"]
        return str(message["tool_calls"][0]["id"])

    assert re.fullmatch("call_[0-9a-f]{24}", id_of("a"))
    assert id_of("a") == id_of("a") != id_of("b")


def added_up(server: LiveServer, **parameters: Any) -> dict[str, Any]:
    """Returns a stream's message, put together as clients do."""
    message: dict[str, Any] = {"role": "", "content": "", "tool_calls": {}}
    for chunk in chunks_of(server.chat(stream=True, **parameters)):
        delta = first(chunk)["delta"]
        for name in ("role", "content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            known = message["tool_calls"].setdefault(call["index"], call)
            assert ("id" in call) is (known is call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
    return message


def test_a_stream_adds_up_to_the_whole_message(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    headers = {"X-Request-Id": "same"}
    whole = first(hermes.chat(tools=TOOLS, headers=headers).json())["message"]
    streamed = added_up(hermes, tools=TOOLS, headers=headers)
    assert (streamed["role"], streamed["content"]) == (whole["role"], whole["content"])
    assert [{**call, "index": None} for call in streamed["tool_calls"].values()] == [
        {**call, "index": None} for call in whole["tool_calls"]
    ]


@pytest.mark.parametrize(("name", "stream"), [("chat_tools.sse", True), ("chat_tools.json", False)])
def test_the_bytes_of_calls_are_as_they_were(hermes: LiveServer, name: str, stream: bool) -> None:
    hermes.engine.rule = saying_tokens(hermes, "So" + CALL)
    assert exact_bytes(hermes, tools=TOOLS, stream=stream) == (GOLDEN / name).read_bytes()


def test_the_official_client_adds_calls_up(hermes: LiveServer) -> None:
    hermes.engine.rule = saying_tokens(hermes, CALLS)
    with OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        with client.chat.completions.stream(model="fake", messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
            events = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
    assert events.count("tool_calls.function.arguments.done") == 2
    assert [json.loads(call.function.arguments) for call in message.tool_calls or []] == [{"city": "Zürich"}, {}]


# The settings.


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3", '{"name": "get_time", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]{}"),
        ("hermes", CALL),
    ],
)
def test_the_format_can_be_set(parser: str, text: str) -> None:
    with live_server(FakeBackend(chat_templates={"default": HERMES}), tool_call_parser=parser) as server:
        server.engine.rule = saying(text)
        assert first(server.chat(tools=TOOLS).json())["finish_reason"] == "tool_calls"


def test_tools_are_refused_where_calls_could_not_be_read() -> None:
    backends = [(FakeBackend(chat_templates={"default": "{{ tools }}" + TURNS}), "auto"), (FakeBackend(), "none")]
    for backend, parser in backends:
        with live_server(backend, tool_call_parser=parser) as server:
            error = error_of(server.chat(tools=TOOLS))
            assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
            assert server.chat(tools=TOOLS, tool_choice="none").status_code == 200
