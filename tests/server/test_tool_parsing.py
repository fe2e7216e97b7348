"""Calls and thinking in text: whatever the model writes and however it is cut, every part is told as what it is."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.parts import Content, Part, Reasoning, ToolCall
from server.tools.parser import ReadingParser
from server.tools.readers import (
    Reader,
    after_thinking,
    read_content,
    read_hermes,
    read_json,
    read_llama,
    read_mistral,
)
from server.tools.tape import MAX_HELD

NAMES = ("f", "get_weather", "a-b.c")
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
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\{}[]é<>\n'), max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("k\\", max_size=3), children, max_size=3),
    max_leaves=6,
)
arguments = st.tuples(
    st.dictionaries(st.sampled_from(["a", "name", "arguments", "}"]), values, max_size=3), st.sampled_from([None, 1])
).map(lambda pair: json.dumps(pair[0], indent=pair[1]))
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)


def parse(reader: Reader, *pieces: str) -> list[Part]:
    """The parts, neighbours of one kind joined."""
    parser = ReadingParser(reader, NAMES, lambda index: f"call_{index}")
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    joined: list[Part] = []
    for part in parts:
        match joined[-1:], part:
            case [Content(before)], Content(text):
                joined[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case [ToolCall(index, before, call_id, name)], ToolCall(id=None, arguments=text):
                assert part.index == index and part.name is None
                joined[-1] = ToolCall(index, before + text, call_id, name)
            case _:
                joined.append(part)
    return joined


def told(calls: Sequence[tuple[str, str]]) -> list[Part]:
    return [ToolCall(index, text, f"call_{index}", name) for index, (name, text) in enumerate(calls)]


def content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def everything(parts: Sequence[Part]) -> str:
    return "".join(part.arguments if isinstance(part, ToolCall) else part.text for part in parts)


def cuts(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", READERS)
@given(text=soup, data=st.data())
def test_the_cutting_of_the_text_changes_nothing(name: str, text: str, data: st.DataObject) -> None:
    whole = parse(READERS[name], text)
    assert parse(READERS[name], *cuts(text, data)) == whole
    assert parse(READERS[name], *text) == whole


@pytest.mark.parametrize("name", READERS)
@given(text=soup.filter(lambda text: '"arguments": "' not in text))
def test_all_that_is_told_was_written_in_this_order(name: str, text: str) -> None:
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
    assert parse(reader, *cuts(text, data)) == told(calls)


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 6, 7])
@given(before=plain, after=plain, calls=calls)
def test_content_around_calls_is_kept(index: int, before: str, after: str, calls: list[tuple[str, str]]) -> None:
    reader, begin, write, between, end = FORMATS[index]
    text = begin + between.join(write(*call) for call in calls) + end
    if index == 3:
        before, after = before.lstrip("{ \n") and "x" + before, "x" + after  # else it may go on with calls
    behind = after.lstrip(" \n")
    if not any(character in behind[:1] for character in "[<"):
        assert parse(reader, *before, *text, *after) == [*content(before), *told(calls), *content(behind)]


@given(calls=calls, data=st.data())
def test_arguments_come_while_they_are_written(calls: list[tuple[str, str]], data: st.DataObject) -> None:
    """Each character that is known to be of the arguments is told at once."""
    name, text = calls[0]
    length = data.draw(st.integers(1, len(text)))
    parser = ReadingParser(read_hermes, NAMES, str)
    parts = parser.feed(hermes(name, text)[: -len(text) - len("}\n</tool_call>")])
    assert parts == []
    assert everything(parser.feed(text[:length])) == text[:length]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>none</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[]"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": , "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": }, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name" "f"}</tool_call>',
        '<tool_call>{name: "f"}</tool_call>',
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "arguments": ',
        '<tool_call>["f"]</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"x": ' + "[" * 5000 + "]" * 5000 + ', "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments" {}}</tool_call>',
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str) -> None:
    assert parse(read_hermes, *text) == [Content(text)]


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (read_llama, 'say {"name": "f"}'),
        (read_llama, '{"name": "g", "parameters": {}}'),
        (read_llama, '<|python_tag|>print("x")'),
        (read_mistral, "[TOOL_CALLS]"),
        (read_mistral, "[TOOL_CALLS][]"),
        (read_mistral, "[TOOL_CALLS]g[ARGS]{}"),
        (read_mistral, "[TOOL_CALLS]f[ARGS]1"),
        (read_mistral, "[TOOL_CALLS]f"),
        (read_json, 'say {"name": "f"}'),
        (read_json, "[1, 2]"),
        (read_json, '{"answer": 42}'),
        (read_content, '<tool_call>{"name": "f"}</tool_call>'),
    ],
)
def test_what_only_looks_like_a_call_is_content_in_other_formats(reader: Reader, text: str) -> None:
    assert parse(reader, *text) == [Content(text)]


def test_a_call_may_have_no_arguments() -> None:
    assert parse(read_hermes, '<tool_call>{"name": "f"}</tool_call>') == told([("f", "{}")])


def test_arguments_in_a_string_are_taken_out_of_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parse(read_hermes, *text) == told([("f", '{"a": 1}')])


def test_a_call_after_one_that_was_none_is_found() -> None:
    text = '<tool_call>{oops}</tool_call><tool_call><tool_call>{"name": "f"}</tool_call>'
    assert parse(read_hermes, *text) == [Content("<tool_call>{oops}</tool_call><tool_call>"), *told([("f", "{}")])]


@pytest.mark.parametrize(
    "end", ["", "}", "}</tool_call>", "}\n</tool_call>\n", "</tool_call>", ', "id": 3}</tool_call>']
)
def test_a_call_ends_where_its_arguments_do(end: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}' + end
    assert parse(read_hermes, *text) == told([("f", '{"a": 1}')])


def test_what_follows_a_broken_end_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, 5</tool_call> so'
    assert parse(read_hermes, *text) == [*told([("f", "{}")]), Content(", 5</tool_call> so")]


def test_only_the_broken_end_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": 1, 5}'
    assert parse(read_hermes, *text) == [*told([("f", "{}")]), Content(", 5}")]


def test_a_call_that_is_cut_off_is_told_as_far_as_it_goes() -> None:
    assert parse(read_hermes, *'<tool_call>{"name": "f", "arguments": {"a": "b') == told([("f", '{"a": "b')])


@pytest.mark.parametrize(
    ("text", "is_one_call", "is_cut"),
    [
        ("Hi", False, False),
        ('{"name": "f", "parameters": {"a": "b', False, True),
        ('{"name": "f", "parameters": {"a": 1}}', False, False),
        ('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"a', False, True),
        ('{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"a', True, False),
    ],
)
def test_it_is_known_whether_the_last_call_told_is_whole(text: str, is_one_call: bool, is_cut: bool) -> None:
    parser = ReadingParser(read_llama, NAMES, str, is_one_call)
    parser.feed(text)
    parser.finish()
    assert parser.is_cut is is_cut


def test_calls_that_break_off_in_a_list_are_content_from_there() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arg": 1]'
    assert parse(read_mistral, *text) == [*told([("f", "{}")]), Content(', {"name": "f", "arg": 1]')]


def test_code_after_a_semicolon_is_content() -> None:
    assert parse(read_llama, *'{"name": "f"}; then') == [*told([("f", "{}")]), Content("; then")]


@pytest.mark.parametrize("filler", ['"' + "x" * 2 * MAX_HELD, " " * 2 * MAX_HELD, "[" * 2 * MAX_HELD])
@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_what_is_held_is_bounded(filler: str, size: int) -> None:
    text = '<tool_call>{"id": ' + filler
    parser = ReadingParser(read_hermes, NAMES, str)
    told = 0
    for begin in range(0, len(text), size):
        told += len(everything(parser.feed(text[begin : begin + size])))
        assert told >= min(begin + size, len(text)) - MAX_HELD
    assert everything(parse(read_hermes, text)) == text


def test_a_call_behind_too_much_is_found_where_it_stands() -> None:
    text = "<tool_call>" + " " * MAX_HELD + '<tool_call>{"name": "f"}'
    expected = [Content("<tool_call>" + " " * MAX_HELD), *told([("f", "{}")])]
    assert parse(read_hermes, text) == parse(read_hermes, *text) == expected


def test_a_call_behind_a_value_that_is_too_long_is_found() -> None:
    head = '<tool_call>{"id": "'
    prefix = head + "x" * (MAX_HELD - len(head))
    expected = [Content(prefix), *told([("f", "{}")])]
    text = prefix + '<tool_call>{"name": "f"}</tool_call>'
    assert parse(read_hermes, text) == parse(read_hermes, *text) == expected


def test_long_messages_take_linear_time() -> None:
    """Quadratic time would be minutes here, and the limit of every test's time be reached."""
    text = hermes("f", json.dumps({"a": "x" * 50})) + "\n"
    assert len(parse(read_hermes, text * 20_000)) == 20_000


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
        [Reasoning(hermes("f", "{}")), *told([("f", "{}")])],
    ),
]


@pytest.mark.parametrize(("text", "parts"), THINKING)
def test_thinking_is_told_apart(text: str, parts: list[Part]) -> None:
    assert parse(READERS["thinking"], *text) == parse(READERS["thinking"], text) == parts


def test_thinking_that_the_prompt_began_goes_to_its_mark() -> None:
    text = "hm</think> " + mistral("f", "{}")
    assert parse(READERS["thought"], *text) == [Reasoning("hm"), *told([("f", "{}")])]


@given(text=plain)
def test_thinking_is_told_to_the_letter(text: str) -> None:
    assert parse(READERS["thought"], *text) == ([Reasoning(text)] if text else [])
