"""Malformed tool calls: what only looks like a call is content, a truncated one is returned as far as it goes."""

import pytest

from server.tools.message_parts import Content
from server.tools.parser import ReadingParser
from server.tools.readers import Reader, read_content, read_hermes, read_json, read_llama, read_mistral
from tests.server.tools.call_texts import FUNCTIONS, parse, tool_calls


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
    "text",
    ['{"name": "f", "parameters": null}', '{"arguments": null , "name": "f"}', '{"name": "f", "arguments":null}'],
)
def test_null_for_arguments_is_a_call_without_any(text: str) -> None:
    assert parse(read_llama, *text) == tool_calls([("f", "{}")])


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
    assert parse(read_hermes, '<tool_call>{"name": "f"}</tool_call>') == tool_calls([("f", "{}")])


def test_arguments_in_a_string_are_taken_out_of_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parse(read_hermes, *text) == tool_calls([("f", '{"a": 1}')])


def test_a_call_after_one_that_was_none_is_found() -> None:
    text = '<tool_call>{oops}</tool_call><tool_call><tool_call>{"name": "f"}</tool_call>'
    assert parse(read_hermes, *text) == [
        Content("<tool_call>{oops}</tool_call><tool_call>"),
        *tool_calls([("f", "{}")]),
    ]


@pytest.mark.parametrize(
    "end", ["", "}", "}</tool_call>", "}\n</tool_call>\n", "</tool_call>", ', "id": 3}</tool_call>']
)
def test_a_call_ends_where_its_arguments_do(end: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}' + end
    assert parse(read_hermes, *text) == tool_calls([("f", '{"a": 1}')])


def test_what_follows_a_broken_end_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, 5</tool_call> so'
    assert parse(read_hermes, *text) == [*tool_calls([("f", "{}")]), Content(", 5</tool_call> so")]


def test_only_the_broken_end_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": 1, 5}'
    assert parse(read_hermes, *text) == [*tool_calls([("f", "{}")]), Content(", 5}")]


def test_a_call_that_is_cut_off_is_returned_as_far_as_it_goes() -> None:
    assert parse(read_hermes, *'<tool_call>{"name": "f", "arguments": {"a": "b') == tool_calls([("f", '{"a": "b')])


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
def test_it_is_known_whether_the_last_returned_call_is_whole(text: str, is_one_call: bool, is_cut: bool) -> None:
    parser = ReadingParser(read_llama, FUNCTIONS, str, is_one_call)
    parser.feed(text)
    parser.finish()
    assert parser.is_cut is is_cut


def test_calls_that_break_off_in_a_list_are_content_from_there() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arg": 1]'
    assert parse(read_mistral, *text) == [*tool_calls([("f", "{}")]), Content(', {"name": "f", "arg": 1]')]


def test_code_after_a_semicolon_is_content() -> None:
    assert parse(read_llama, *'{"name": "f"}; then') == [*tool_calls([("f", "{}")]), Content("; then")]
