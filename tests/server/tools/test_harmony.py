"""Channels of gpt-oss: thoughts, content and calls are told apart by headers, and forced behind the right ones."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.harmony import HARMONY_MARKS, read_harmony
from server.tools.message_parts import Content, Part, Reasoning, ToolCall
from tests.engine.grammar.grammars import accepted
from tests.fuzz import fuzz
from tests.server.events import first
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.tools.call_texts import cuts, parse, tool_calls
from tests.server.tools.tool_chats import TOOLS, TURNS, calls_in

pytestmark = pytest.mark.fuzz

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
NEXT = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}"
FINAL = "<|channel|>final<|message|>Yes"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}<|return|>", [Reasoning("Hm."), Content("Yes")]),
        (FINAL, [Content("Yes")]),
        ("<|channel|>commentary<|message|>So:<|end|>", [Content("So:")]),
        (
            f'{THOUGHT}{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}<|call|>',
            [Reasoning("Hm."), *tool_calls([("f", '{"a": 1}')])],
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', tool_calls([("f", '{"a": 1}')])),
        (
            f"{THOUGHT}{NEXT} to=functions.f<|channel|>commentary<|message|>{{}}<|call|>{NEXT}{THOUGHT}",
            [Reasoning("Hm."), *tool_calls([("f", "{}")]), Reasoning("Hm.")],
        ),
        ('<|channel|>commentary to=functions.f<|message|>{"a": "b', tool_calls([("f", '{"a": "b')])),
        ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", [Content("{}")]),
        ("<|channel|>commentary to=python<|message|>1 + 2<|call|>", [Content("1 + 2")]),
        ("No header <| at all", [Content("No header <| at all")]),
        ("assistant: to=x", [Content("assistant: to=x")]),
        ("<|channel|>analysis<|message|>Hm", [Reasoning("Hm")]),
        ("<|channel|>anal", []),
        ("<|start|>Well, so<|channel|>final<|message|>Yes", [Content("Well, so<|channel|>final<|message|>Yes")]),
        ("<|channel|>analysis<|mess ž", [Content("<|channel|>analysis<|mess ž")]),
        ("", []),
    ],
)
def test_messages_are_told_apart_by_their_headers(text: str, parts: list[Part]) -> None:
    assert parse(read_harmony, *text) == parse(read_harmony, text) == parts


PIECES = [*HARMONY_MARKS, "analysis", "final", " to=functions.f", "{}", '{"a": "', "a", "\n", "<|", "é", "assistant"]


@fuzz(300)
@given(text=st.lists(st.sampled_from(PIECES), max_size=20).map("".join), data=st.data())
def test_the_cutting_of_any_text_changes_nothing(text: str, data: st.DataObject) -> None:
    whole = parse(read_harmony, text)
    assert parse(read_harmony, *text) == parse(read_harmony, *cuts(text, data)) == whole


@given(text=st.text("ab <|>\n{}é", max_size=30).filter(lambda text: "<|" not in text))
def test_text_without_marks_is_content_to_the_letter(text: str) -> None:
    assert parse(read_harmony, *text) == ([Content(text)] if text else [])


TEMPLATE = "{{ tools | tojson if tools }}{# <|start|><|channel|><|message|> #}" + TURNS


@pytest.fixture(scope="module")
def shared_harmony(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": TEMPLATE})) as server:
        yield server


@pytest.fixture
def harmony(shared_harmony: LiveServer) -> Generator[LiveServer, None, None]:
    shared_harmony.engine.reset()
    yield shared_harmony
    shared_harmony.wait_until_idle()


def test_channels_are_read_without_tools_too(harmony: LiveServer) -> None:
    harmony.engine.rule = saying(f"{THOUGHT}{NEXT}{FINAL}")
    body = harmony.chat().json()
    message = first(body)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT)


def test_all_thoughts_are_counted(harmony: LiveServer) -> None:
    harmony.engine.rule = saying(f"{THOUGHT}{NEXT}{CALL}<|call|>{NEXT}{THOUGHT}")
    body = harmony.chat(tools=TOOLS).json()
    assert first(body)["message"]["reasoning_content"] == "Hm.Hm."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len(THOUGHT) + len(NEXT)


def test_calls_are_returned_as_calls(harmony: LiveServer) -> None:
    harmony.engine.rule = saying(f"{THOUGHT}{NEXT}{CALL}<|call|>")
    choice = first(harmony.chat(tools=TOOLS).json())
    assert calls_in(choice["message"]) == [("get_time", "{}")] and choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "Hm."


JSON = {"type": "json_object"}
OBJECT = "<|channel|>final<|message|>{}"


@pytest.mark.parametrize(
    ("parameters", "texts"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, [CALL, f"{THOUGHT}{NEXT}{CALL}"]),
        ({"response_format": JSON}, [OBJECT, f"{THOUGHT}{NEXT}{OBJECT}"]),
        ({"tools": TOOLS, "response_format": JSON}, [CALL, OBJECT]),
    ],
)
def test_what_is_guaranteed_stands_behind_its_header(
    harmony: LiveServer, parameters: dict[str, Any], texts: list[str]
) -> None:
    response = harmony.chat(**parameters)
    assert response.status_code == 200, response.text
    lark = harmony.engine.requests[-1].params.grammar or ""
    assert accepted(lark, *texts, "{}", FINAL, THOUGHT, CALL + CALL) == texts
    for text in texts:
        assert any(
            isinstance(part, ToolCall | Content) for part in parse(read_harmony, text, functions={"get_time": {}})
        )
