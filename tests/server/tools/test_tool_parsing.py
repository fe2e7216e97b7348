"""Parsing of calls and thinking: whatever the model writes and however it is cut, every part gets its kind."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.incremental_text import MAX_HELD
from server.tools.message_parts import Content, Part, Reasoning, ToolCall
from server.tools.parser import ReadingParser
from server.tools.readers import (
    Reader,
    read_content,
    read_hermes,
    read_json,
    read_llama,
    read_mistral,
)
from server.tools.thinking import after_thinking
from tests.server.tools.call_texts import FUNCTIONS, calls, cuts, parse, tool_calls

READERS = {
    "hermes": read_hermes,
    "llama": read_llama,
    "mistral": read_mistral,
    "json": read_json,
    "content": read_content,
    "thinking": after_thinking(read_hermes, starts_inside=False),
    "thought": after_thinking(read_mistral, starts_inside=True),
}
MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "thinking": ["<think>", "</think>"],
}
FRAGMENTS = [
    *(mark for marks in MARKS.values() for mark in marks),
    *(
        "[ARGS]",
        "[CALL_ID]",
        "<tool_",
        "[TOOL",
        '{"name": "f"',
        ', "arguments": ',
        ', "parameters": {',
        '{"a": "}\\""}',
    ),
    *("{", "}", "[", "]", ",", ";", ":", '"', "\\", "f", '"name"', '"arguments"', " ", "\n", "<", "x", "é", "1"),
]
soup = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
plain = st.text(st.sampled_from("ab <[{;]}>\n|/é"), max_size=12)


def content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def everything(parts: Sequence[Part]) -> str:
    return "".join(part.arguments if isinstance(part, ToolCall) else part.text for part in parts)


@pytest.mark.parametrize("name", READERS)
@given(text=soup, data=st.data())
def test_the_cutting_of_the_text_changes_nothing(name: str, text: str, data: st.DataObject) -> None:
    whole = parse(READERS[name], text)
    assert parse(READERS[name], *cuts(text, data)) == whole
    assert parse(READERS[name], *text) == whole


@pytest.mark.parametrize("name", READERS)
@given(text=soup.filter(lambda text: '"arguments": "' not in text))
def test_all_parts_were_written_in_this_order(name: str, text: str) -> None:
    rest = iter(text)
    parts = [
        part for part in parse(READERS[name], *text) if not (isinstance(part, ToolCall) and part.arguments == "{}")
    ]
    assert all(character in rest for character in everything(parts))


@pytest.mark.parametrize(("name", "marks"), MARKS.items())
@given(text=plain)
def test_text_without_marks_is_content_to_the_letter(name: str, marks: list[str], text: str) -> None:
    assert parse(READERS[name], *text) == content(text)


def hermes(name: str, text: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def hermes_swapped(name: str, text: str) -> str:
    return f'<tool_call>{{"arguments": {text}, "id": 7, "name": "{name}"}}</tool_call>'


def llama(name: str, text: str) -> str:
    return f'{{"name": "{name}", "parameters": {text}}}'


def mistral(name: str, text: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{text}"


def mistral_with_ids(name: str, text: str) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]abc123def[ARGS]{text}"


FORMATS: list[tuple[Reader, str, Any, str, str]] = [
    (read_hermes, "", hermes, "\n", ""),
    (read_hermes, "", hermes_swapped, "", "\n"),
    (read_llama, "", llama, "; ", ""),
    (read_llama, "<|python_tag|>", llama, ";\n", ""),
    (read_mistral, "[TOOL_CALLS][", llama, ", ", "]"),
    (read_mistral, "[TOOL_CALLS] [ ", llama, " ,", " ]"),
    (read_mistral, "", mistral, "", ""),
    (read_mistral, "", mistral_with_ids, " ", ""),
    (read_json, "", llama, "\n", ""),
    (read_json, "\n[", llama, ",\n", "]\n"),
]


@pytest.mark.parametrize(("reader", "begin", "write", "between", "end"), FORMATS)
@given(calls=calls, data=st.data())
def test_calls_are_read_as_they_were_written(
    reader: Reader, begin: str, write: Any, between: str, end: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    text = begin + between.join(write(*call) for call in calls) + end
    assert parse(reader, *cuts(text, data)) == tool_calls(calls)


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 6, 7])
@given(before=plain, after=plain, calls=calls)
def test_content_around_calls_is_kept(index: int, before: str, after: str, calls: list[tuple[str, str]]) -> None:
    reader, begin, write, between, end = FORMATS[index]
    text = begin + between.join(write(*call) for call in calls) + end
    if index == 3:
        before, after = before.lstrip("{ \n") and "x" + before, "x" + after  # else it may go on with calls
    behind = after.lstrip(" \n")
    if not any(character in behind[:1] for character in "[<"):
        assert parse(reader, *before, *text, *after) == [*content(before), *tool_calls(calls), *content(behind)]


@given(calls=calls, data=st.data())
def test_arguments_come_while_they_are_written(calls: list[tuple[str, str]], data: st.DataObject) -> None:
    """Each character that is known to be of the arguments is emitted at once."""
    name, text = calls[0]
    length = data.draw(st.integers(1, len(text)))
    parser = ReadingParser(read_hermes, FUNCTIONS, str)
    parts = parser.feed(hermes(name, text)[: -len(text) - len("}\n</tool_call>")])
    assert parts == []
    assert everything(parser.feed(text[:length])) == text[:length]


@pytest.mark.parametrize("filler", ['"' + "x" * 2 * MAX_HELD, " " * 2 * MAX_HELD, "[" * 2 * MAX_HELD])
@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_what_is_held_is_bounded(filler: str, size: int) -> None:
    text = '<tool_call>{"id": ' + filler
    parser = ReadingParser(read_hermes, FUNCTIONS, str)
    num_emitted = 0
    for begin in range(0, len(text), size):
        num_emitted += len(everything(parser.feed(text[begin : begin + size])))
        assert num_emitted >= min(begin + size, len(text)) - MAX_HELD
    assert everything(parse(read_hermes, text)) == text


def test_a_call_behind_too_much_is_found_where_it_stands() -> None:
    text = "<tool_call>" + " " * MAX_HELD + '<tool_call>{"name": "f"}'
    expected = [Content("<tool_call>" + " " * MAX_HELD), *tool_calls([("f", "{}")])]
    assert parse(read_hermes, text) == parse(read_hermes, *text) == expected


def test_a_call_behind_a_value_that_is_too_long_is_found() -> None:
    head = '<tool_call>{"id": "'
    prefix = head + "x" * (MAX_HELD - len(head))
    expected = [Content(prefix), *tool_calls([("f", "{}")])]
    text = prefix + '<tool_call>{"name": "f"}</tool_call>'
    assert parse(read_hermes, text) == parse(read_hermes, *text) == expected


def test_long_messages_take_linear_time() -> None:
    """Quadratic time would be minutes here, more than the time limit of a test."""
    text = hermes("f", json.dumps({"a": "x" * 50})) + "\n"
    assert len(parse(read_hermes, text * 20_000)) == 20_000


@pytest.mark.parametrize(
    "text", ['{"name": "f", "argument": {"a": 1}}', '{"name": "f", "id": 7, "args": {}}', '{"name": "f", "a": 1}']
)
def test_a_call_whose_arguments_have_another_name_is_content(text: str) -> None:
    """They would be lost."""
    assert parse(read_json, *text) == [Content(text)]


THINKING = [
    ("<think>hm</think>\n\nYes", [Reasoning("hm"), Content("Yes")]),
    ("\n<think>\nhm\n</think>Yes", [Reasoning("\nhm\n"), Content("Yes")]),
    ("<think></think> Yes ", [Content("Yes ")]),
    ("<think>hm</th", [Reasoning("hm</th")]),
    ("Yes <think>hm</think>", [Content("Yes <think>hm</think>")]),
    (" <thin", [Content(" <thin")]),
    ("<think>a</think><think>b</think>", [Reasoning("a"), Content("<think>b</think>")]),
    (
        "<think>" + hermes("f", "{}") + "</think>" + hermes("f", "{}"),
        [Reasoning(hermes("f", "{}")), *tool_calls([("f", "{}")])],
    ),
]


@pytest.mark.parametrize(("text", "parts"), THINKING)
def test_thinking_is_separated_from_content(text: str, parts: list[Part]) -> None:
    assert parse(READERS["thinking"], *text) == parse(READERS["thinking"], text) == parts


def test_thinking_that_the_prompt_began_goes_to_its_mark() -> None:
    text = "hm</think> " + mistral("f", "{}")
    assert parse(READERS["thought"], *text) == [Reasoning("hm"), *tool_calls([("f", "{}")])]


@given(text=plain)
def test_thinking_is_kept_to_the_letter(text: str) -> None:
    assert parse(READERS["thought"], *text) == ([Reasoning(text)] if text else [])
