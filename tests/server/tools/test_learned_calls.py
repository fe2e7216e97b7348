"""Calls of learned formats: whatever arguments are written, and however the text is cut, they are read back equal."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.formats import CallFormat
from server.tools.message_parts import Content, Part, Reasoning, ToolCall
from server.tools.parser import ReadingParser
from server.tools.spelling import HOLE, TaggedArguments
from server.tools.thinking import after_thinking
from tests.fuzz import fuzz
from tests.server.tools.call_templates import LEARNED
from tests.server.tools.call_texts import cuts, parse, tool_calls

pytestmark = pytest.mark.fuzz


MARKS = sorted({mark.strip() for form in LEARNED.values() for mark in form.marks if mark.strip() and HOLE not in mark})
in_each_format = pytest.mark.parametrize("form", LEARNED.values(), ids=LEARNED)

texts = st.lists(st.sampled_from(["a", "\n", " ", '"', "'", "\\", "é", "𝄞", "{", ",", "true", "5", *MARKS]), max_size=6)
numbers = st.integers(-(2**70), 2**70) | st.sampled_from([0.5, -1e300, 1e-7])
inner = st.recursive(
    st.none() | st.booleans() | numbers | st.text("ab \n\"'\\é<", max_size=4),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["k", "e_2"]), values, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["a", "b_2", "Name"]), texts.map("".join) | inner, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), arguments), min_size=1, max_size=3)


def type_of(value: Any) -> dict[str, Any]:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": names.get(type(value), "null")}


def offered(written: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns functions whose schemas say of which types the arguments are."""
    functions: dict[str, dict[str, Any]] = {name: {"properties": {}} for name in ("f", "get_weather")}
    for name, values in written:
        for key, value in values.items():
            options = functions[name]["properties"].setdefault(key, {"anyOf": []})["anyOf"]
            options.append(type_of(value))
    return functions


def can_be_written(form: CallFormat, written: list[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the notation has a way to write these: some have no escapes, and some do not say of which type a value
    is."""
    notation = form.spelling.arguments
    functions = offered(written)
    options = [each["anyOf"] for function in functions.values() for each in function["properties"].values()]
    if isinstance(notation, TaggedArguments):
        close = re.escape(notation.after_value.strip())
        follows = "|".join(re.escape(each.strip()) for each in (notation.before_key, form.spelling.after_arguments))
        ends = re.compile(rf"{close}\s*({follows}|$)")
        is_clear = not any(
            ends.search(value) for _, values in written for value in values.values() if isinstance(value, str)
        )
        return is_clear and all(len({each["type"] for each in each_options}) == 1 for each_options in options)
    return '<|"|>' not in json.dumps([values for _, values in written], ensure_ascii=False).replace('\\"', '"')


def spelled(form: CallFormat, written: list[tuple[str, dict[str, Any]]]) -> str:
    return form.spelling.of([(name, json.dumps(values, ensure_ascii=False)) for name, values in written])


def read(form: CallFormat, *pieces: str, functions: Mapping[str, Any]) -> list[tuple[str | None, Any]]:
    """Returns the calls, their arguments parsed; everything must be part of a call, but spaces."""
    parts = parse(form.read, *pieces, functions=functions)
    assert not "".join(part.text for part in parts if not isinstance(part, ToolCall)).strip(), parts
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]


@in_each_format
@fuzz(60)
@given(written=calls, data=st.data())
def test_what_is_written_is_read_back_equal(form: CallFormat, written: Any, data: st.DataObject) -> None:
    if can_be_written(form, written):
        text, functions = spelled(form, written), offered(written)
        assert read(form, *text, functions=functions) == written
        assert read(form, *cuts(text, data), functions=functions) == written


@in_each_format
def test_no_arguments_are_an_empty_object(form: CallFormat) -> None:
    text = spelled(form, [("f", {}), ("get_weather", {})])
    assert read(form, *text, functions={"f": {}, "get_weather": {}}) == [("f", {}), ("get_weather", {})]


@in_each_format
def test_text_around_calls_is_kept(form: CallFormat) -> None:
    text = f"Let me see.{spelled(form, [('f', {'a': 'x'})])}\nDone."
    calls = tool_calls([("f", '{"a": "x"}')])
    assert parse(form.read, *text) == [Content("Let me see."), *calls, Content("Done.")]


@in_each_format
def test_a_call_of_what_was_not_offered_is_content(form: CallFormat) -> None:
    text = spelled(form, [("other", {"a": "x"})])
    assert parse(form.read, *text) == [Content(text)]


@in_each_format
def test_the_name_comes_first_and_each_argument_when_it_is_complete(form: CallFormat) -> None:
    text = spelled(form, [("f", {"a": "x" * 50, "b": "y" * 50})])
    parser = ReadingParser(form.read, {"f": {}}, str)
    parts = [part for character in text[: text.index("y" * 50) + 1] for part in parser.feed(character)]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert calls[0].name == "f" and "x" * 50 in _joined(calls[1:])


def test_strings_between_marks_come_while_they_are_written() -> None:
    parser = ReadingParser(LEARNED["parameters"].read, {"f": {"properties": {"a": {"type": "string"}}}}, str)
    parts = parser.feed('<do>\n<function=f>\n<parameter=a>\nsay "x"\nand')
    assert _joined(parts) == '{"a": "say \\"x\\"\\nan'
    assert _joined(parser.feed("\n</parameter>\n</function>\n</do>")) == 'd"}'


def _text(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCall) else part.text


def _joined(parts: list[Part]) -> str:
    return "".join(map(_text, parts))


@in_each_format
@pytest.mark.parametrize("end", range(1, 200, 7))
def test_a_call_that_is_cut_off_is_a_prefix_of_it(form: CallFormat, end: int) -> None:
    text = spelled(form, [("f", {"a": "some text", "b": "more"})])[:end].rstrip()
    functions = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}}
    calls = [part for part in parse(form.read, *text, functions=functions) if isinstance(part, ToolCall)]
    whole = '{"a": "some text", "b": "more"}'
    assert all(whole.startswith(call.arguments) for call in calls)


soup_pieces = st.sampled_from(
    ["f", "g", "a", " ", "\n", '"', "'", "{}", '{"a": 1}', "=", ":0", "1", ",", "<", "é", *MARKS]
)
soup = st.lists(soup_pieces, max_size=25).map("".join)


@in_each_format
@fuzz(80)
@given(text=soup, data=st.data())
def test_the_cutting_of_any_text_changes_nothing(form: CallFormat, text: str, data: st.DataObject) -> None:
    reader = after_thinking(form.read, starts_inside=False)
    whole = parse(reader, text)
    assert parse(reader, *text) == parse(reader, *cuts(text, data)) == whole


@in_each_format
@fuzz(80)
@given(text=soup)
def test_without_an_offered_function_all_text_is_content(form: CallFormat, text: str) -> None:
    parts = parse(form.read, *text, functions={})
    assert "".join(_text(part) for part in parts) == text


@in_each_format
def test_thoughts_may_stand_between_calls(form: CallFormat) -> None:
    one, two = (spelled(form, [("f", {"a": each})]).strip() for each in "xy")
    text = f"<think>A</think>{one}<think>B</think>\n{two}"
    first, second = tool_calls([("f", '{"a": "x"}'), ("f", '{"a": "y"}')])
    parts = parse(after_thinking(form.read, starts_inside=False), *text)
    assert parts == [Reasoning("A"), first, Reasoning("B"), second]


@in_each_format
def test_spaces_that_only_separate_may_differ(form: CallFormat) -> None:
    notation = form.spelling.arguments
    if isinstance(notation, TaggedArguments) and "\n" in form.spelling.before_arguments:
        text = spelled(form, [("f", {"a": "x", "b": "y"})])
        for other in (text.replace(">\n<", "><"), text.replace(">\n<", ">\n \n<")):
            if other.count("\nx\n") or ">x<" in other:
                calls = tool_calls([("f", '{"a": "x", "b": "y"}')])
                assert parse(form.read, *other.strip()) == calls


def test_a_mark_that_nothing_of_the_format_follows_is_part_of_the_value() -> None:
    text = "<do>\n<function=f>\n<parameter=a>\nx\n</parameter>\noops\n</parameter>\n</function>\n</do>"
    functions = {"f": {"properties": {"a": {"type": "string"}}}}
    calls = tool_calls([("f", '{"a": "x\\n</parameter>\\noops"}')])
    assert parse(LEARNED["parameters"].read, *text, functions=functions) == calls


@pytest.mark.parametrize("end", ["</function></do>", "</do>", "\n</do>\n", ""])
def test_what_closes_a_call_may_be_forgotten(end: str) -> None:
    text = f"<do>\n<function=f>\n<parameter=a>\nx\n</parameter>{end}"
    parts = parse(LEARNED["parameters"].read, *text)
    assert parts == tool_calls([("f", '{"a": "x"}' if end else '{"a": "x"')])


def test_what_follows_a_broken_argument_is_content_and_the_call_stands() -> None:
    text = "<|py|>[f(a='x', b=1+2)]<|/py|>"
    assert parse(LEARNED["python"].read, *text) == [*tool_calls([("f", '{"a": "x"}')]), Content(", b=1+2)]<|/py|>")]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("parameters", "<do>\n<function=f>\n<parameter=a>\n[1, 2", '{"a": [1, 2'),
        ("parameters", "<do>\n<function=f>\n<parameter=a>\nsome te", '{"a": "some te'),
        ("parameters", "<do>\n<function=f>\n<parameter=a>\nsome te\n</para", '{"a": "some te'),
        ("parameters", "<do>\n<function=f>\n<parameter=a>\ntrue, so", '{"a": "true, so'),
        ("parameters", "<do>\n<function=f>\n<parameter=na", '{"na'),
        ("pairs", "<do>f\n<key>a</key>\n<value>1</value>\n<key>b</ke", '{"a": 1, "b'),
        ("python", "<|py|>[f(a='x', b='so", '{"a": "x", "b": "so'),
        ("python", "<|py|>[f(a='x', b='y'", '{"a": "x", "b": "y"'),
        ("python", "<|py|>[f(a='x', na", '{"a": "x", "na'),
        ("braces", '<|tool>call:f{a:1,b:<|"|>so<|"', '{"a": 1, "b": "so'),
    ],
)
def test_of_a_call_that_is_cut_off_there_is_as_much_as_was_written(name: str, text: str, arguments: str) -> None:
    parser = ReadingParser(LEARNED[name].read, {"f": {}}, str)
    assert _joined([*parser.feed(text), *parser.finish()]) == arguments and parser.is_cut
