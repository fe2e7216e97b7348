"""Guarantees of tool calls: required and strict ones follow a grammar, or are refused."""

from collections.abc import Generator
from typing import Any

import pytest

from engine.grammar.compiler import compile_grammar, make_tokenizer
from server.tools.formats import HERMES as HERMES_FORMAT
from server.tools.formats import LLAMA
from tests.engine.grammar.grammars import accepted
from tests.server.events import error_of, first
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import WEATHER
from tests.server.tools.tool_chats import HERMES, ONLY_TIME, TOOLS, TURNS, calls_in, function


@pytest.fixture(scope="module")
def shared_plain_marks(no_settings_from_outside: None) -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": HERMES + "{% if deep %}<think>{% endif %}"})) as server:
        yield server


@pytest.fixture
def caller(shared_plain_marks: LiveServer) -> Generator[LiveServer, None, None]:
    """A server whose model thinks, and whose marks are plain text instead of special tokens."""
    shared_plain_marks.engine.reset()
    yield shared_plain_marks
    shared_plain_marks.wait_until_idle()


def grammar(server: LiveServer, **parameters: Any) -> str:
    """Returns the grammar that the engine is given."""
    response = server.chat(**{"tools": TOOLS, **parameters})
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].params.grammar or ""


WEATHER_CALL = HERMES_FORMAT.spelling.of([("get_weather", '{"city": "x"}')])
TIME_CALL = HERMES_FORMAT.spelling.of([("get_time", "{}")])
BAD_CALL = HERMES_FORMAT.spelling.of([("get_weather", '{"city": 1}')])
TWO_CALLS = HERMES_FORMAT.spelling.of([("get_time", "{}"), ("get_weather", '{"city": "x"}')])
TEXTS = ["Hello", WEATHER_CALL, TIME_CALL, BAD_CALL, TWO_CALLS, f"So {TIME_CALL}"]
REQUIRED_TIME = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("get_time")]}}
STRICT = [function(parameters=WEATHER, strict=True), function("get_time")]


@pytest.mark.parametrize(
    ("parameters", "texts"),
    [
        ({"tool_choice": "required"}, [WEATHER_CALL, TIME_CALL, TWO_CALLS]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [WEATHER_CALL, TIME_CALL]),
        ({"tool_choice": function()}, [WEATHER_CALL]),
        ({"tool_choice": REQUIRED_TIME}, [TIME_CALL]),
        ({"tools": STRICT}, ["Hello", WEATHER_CALL, TIME_CALL, TWO_CALLS, f"So {TIME_CALL}", "{}"]),
        ({"tools": STRICT, "parallel_tool_calls": False}, ["Hello", WEATHER_CALL, TIME_CALL, f"So {TIME_CALL}", "{}"]),
        ({"response_format": {"type": "json_object"}}, [WEATHER_CALL, TIME_CALL, TWO_CALLS, "{}"]),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, ["{}"]),
        ({"response_format": {"type": "json_object"}, "tool_choice": function("get_time")}, [TIME_CALL]),
    ],
)
def test_calls_follow_what_was_asked_for(caller: LiveServer, parameters: dict[str, Any], texts: list[str]) -> None:
    lark = grammar(caller, **parameters)
    assert accepted(lark, *TEXTS, "{}") == texts
    thought = "<think>Hm.\n</think>\n\n"
    assert accepted(lark, *(thought + text for text in texts)) == [thought + text for text in texts]


def test_calls_follow_after_the_thinking_that_the_prompt_began(caller: LiveServer) -> None:
    lark = grammar(caller, tool_choice="required", chat_template_kwargs={"deep": True})
    assert accepted(lark, TIME_CALL, f"hm</think>\n{TIME_CALL}", "hm</think>") == [f"hm</think>\n{TIME_CALL}"]


def test_what_is_left_to_the_model_needs_no_grammar(caller: LiveServer) -> None:
    assert grammar(caller) == grammar(caller, tool_choice="auto") == ""
    assert grammar(caller, tool_choice=ONLY_TIME, tools=STRICT) == ""
    assert grammar(caller, tool_choice="none", tools=STRICT) == ""


def test_required_calls_are_returned_as_calls(caller: LiveServer) -> None:
    caller.engine.rule = saying(TWO_CALLS)
    choice = first(caller.chat(tools=TOOLS, tool_choice="required").json())
    assert calls_in(choice["message"]) == [("get_time", "{}"), ("get_weather", '{"city": "x"}')]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"


SPECIAL = make_tokenizer([*(bytes([byte]) for byte in range(0xF8)), *[b""] * 9], [256])
"""A vocabulary of bytes, in which those that are never in UTF-8 are special tokens, as in the tests' tokenizer."""


def accepted_tokens(server: LiveServer, lark: str, *texts: str) -> list[str]:
    """Returns those texts that may be generated if each mark is its special token."""

    def is_accepted(text: str) -> bool:
        matcher = compile_grammar(SPECIAL, lark)
        ids = server.engine.tokenizer.encode(text, add_special_tokens=False)
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    return [text for text in texts if is_accepted(text)]


def test_calls_are_forced_through_marks_that_are_special_tokens(hermes: LiveServer) -> None:
    lark = grammar(hermes, tool_choice="required")
    assert accepted_tokens(hermes, lark, *TEXTS) == [WEATHER_CALL, TIME_CALL, TWO_CALLS]


def test_strict_calls_begin_with_marks_that_are_special_tokens(hermes: LiveServer) -> None:
    lark = grammar(hermes, tools=STRICT)
    good = ["Hello", WEATHER_CALL, TIME_CALL, TWO_CALLS, f"So {TIME_CALL}"]
    assert accepted_tokens(hermes, lark, *TEXTS) == good


def test_a_strict_mark_is_not_spelled_in_text_either(hermes: LiveServer) -> None:
    matcher = compile_grammar(SPECIAL, grammar(hermes, tools=STRICT))
    assert not matcher.consume_tokens(list(b"So <tool_call>"))


def test_calls_without_a_mark_can_be_strict() -> None:
    with live_server(FakeBackend(chat_templates={"default": "{{ tools }} <|python_tag|>" + TURNS})) as llama:
        lark = grammar(llama, tools=STRICT)
    texts = ["Hello", LLAMA.spelling.of([("get_weather", '{"city": "x"}')])]
    assert accepted(lark, *texts, LLAMA.spelling.of([("get_weather", "{}")]), "{}") == texts


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("/properties/a/not", {"type": "object", "properties": {"a": {"not": {}}}}),
        ("$ref", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/x"}}}),
        ("/required", {"type": "object", "properties": {"a": {"type": "string"}}, "required": [None]}),
        ("unclosed", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_place(caller: LiveServer, place: str, schema: Any) -> None:
    for parameters in ({"tool_choice": "required"}, {}, {"response_format": {"type": "json_object"}}):
        tools = [*TOOLS, function("f", parameters=schema, strict=not parameters)]
        error = error_of(caller.chat(tools=tools, **parameters))
        assert error["param"] == "tools.2.function.parameters" and place in error["message"], error
    assert caller.chat(tools=[function("f", parameters=schema)]).status_code == 200


def test_a_schema_that_need_not_be_followed_is_not_blamed(caller: LiveServer) -> None:
    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [function("f", parameters=wrong), function("g", parameters=wrong, strict=True)]
    assert error_of(caller.chat(tools=tools))["param"] == "tools.1.function.parameters"
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
    assert error_of(caller.chat(tools=TOOLS, response_format=response_format))["param"] == "response_format"


@pytest.mark.parametrize("deep", [False, True])
def test_thoughts_between_special_marks_come_before_what_is_guaranteed(thinker: LiveServer, deep: bool) -> None:
    lark = grammar(thinker, tools=[function("get_time")], tool_choice="required", chat_template_kwargs={"deep": deep})
    call = '{"name": "get_time", "arguments": {}}'
    opened = "" if deep else "<think>"
    texts = [f"{opened}hm</think>\n\n{call}", f"{opened}hm</think>{call}", f"{opened}hm</think>Yes", f"{opened}hm"]
    assert accepted_tokens(thinker, lark, *texts) == texts[:2]
