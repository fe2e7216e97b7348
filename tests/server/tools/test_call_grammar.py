"""Grammars of calls: what they accept is parsed as calls whose arguments satisfy the schemas, and nothing else is."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.grammar.compiler import compile_grammar
from engine.grammar.lark import Part, to_lark
from server.protocol.tools import Function
from server.tools.call_grammar import _text_without, calls_only, strict_calls
from server.tools.formats import HERMES, JSON, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, CallFormat
from server.tools.message_parts import Content, ToolCall
from tests.engine.grammar.grammars import TOKENIZER, accepts
from tests.server.tools.call_templates import LEARNED
from tests.server.tools.call_texts import parse

FORMATS = (HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, JSON, *LEARNED.values())
EOS = 256
LENGTH = 150  # bytes after which a random text is led to its end

in_each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.spelling.opening}")

scalars = st.sampled_from(
    [{"type": "string", "maxLength": 5}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["}", "</tool_call>", 1]}]
)
schemas = st.recursive(
    scalars,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.builds(
            lambda properties, count: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:count],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "name", "arguments", "é"]), inner, max_size=3),
            st.integers(0, 3),
        )
    ),
    max_leaves=6,
)
parameters = schemas.filter(lambda schema: schema.get("type") == "object")


def function(name: str = "f", parameters: dict[str, Any] | None = None, strict: bool = False) -> Function:
    return Function(name=name, parameters=parameters, strict=strict)


def random_text(part: Part, seed: int) -> str:
    """Returns a random text that the grammar accepts."""
    rng, matcher, data = random.Random(seed), compile_grammar(TOKENIZER, to_lark(part)), bytearray()
    while True:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(EOS + 1) if bits >> token & 1]
        assert allowed, matcher.get_error()
        if EOS in allowed and (allowed == [EOS] or len(data) > LENGTH or rng.random() < 0.3):
            return data.decode()
        choices = [token for token in allowed if token != EOS and token < 0x80] or allowed
        enders = [token for token in choices if token in b'"}]']
        token = rng.choice(enders if enders and (len(data) > LENGTH or rng.random() < 0.3) else choices)
        assert matcher.consume_token(token)
        data.append(token)


@in_each_format
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], max_examples=10, deadline=None)
@given(parameters, parameters, st.integers(0, 2**32))
def test_forced_calls_are_calls_that_satisfy_their_schemas(
    form: CallFormat, first: dict[str, Any], second: dict[str, Any], seed: int
) -> None:
    by_name = {"f": first, "get_weather": second}
    text = random_text(
        calls_only(form, [function(name, schema) for name, schema in by_name.items()], is_one=False), seed
    )
    calls = [part for part in parse(form.read, text, functions=by_name) if part != Content("\n")]
    assert calls
    for call in calls:
        assert isinstance(call, ToolCall) and call.name is not None
        jsonschema.validate(json.loads(call.arguments), by_name[call.name])


WHOLE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
F = function("f", WHOLE)
ONE, TWO = [("f", '{"n": 1}')], [("f", '{"n": 1}'), ("f", '{"n": 2}')]
BAD = [("f", '{"n": "x"}')]


@in_each_format
def test_forced_calls_are_as_they_are_spelled(form: CallFormat) -> None:
    part = calls_only(form, [F], is_one=False)
    assert accepts(part, form.spelling.of(ONE)) and accepts(part, form.spelling.of(TWO))
    for text in ("", "text", form.spelling.of(BAD), "text" + form.spelling.of(ONE), form.spelling.of([("g", "{}")])):
        assert not accepts(part, text)


@in_each_format
def test_no_more_calls_are_allowed_than_may_be(form: CallFormat) -> None:
    for part in (calls_only(form, [F], is_one=True), strict_calls(form, [F], is_one=True)):
        assert accepts(part, form.spelling.of(ONE)) and not accepts(part, form.spelling.of(TWO))


def test_a_function_without_parameters_takes_nothing() -> None:
    part = calls_only(JSON, [function()], is_one=False)
    assert accepts(part, '{"name": "f", "arguments": {}}')
    assert not accepts(part, '{"name": "f", "arguments": {"a": 1}}')


def test_a_schema_without_a_type_is_that_of_an_object() -> None:
    assert not accepts(
        calls_only(JSON, [function(parameters={"properties": {}})], is_one=False), '{"name": "f", "arguments": 1}'
    )


@in_each_format
def test_strict_calls_leave_text_free_and_calls_bound(form: CallFormat) -> None:
    part = strict_calls(form, [function("f", WHOLE, strict=True), function("get_weather", WHOLE)], is_one=False)
    loose = form.spelling.of([("get_weather", '{"n": "x"}')])
    for text in ("", "Hello <there>\n{}", "a [b", form.spelling.of(ONE), form.spelling.of(TWO), loose):
        assert accepts(part, text), text
    for text in (form.spelling.of(BAD), form.spelling.of(ONE)[:-3], form.spelling.of([*ONE, *BAD])):
        assert not accepts(part, text), text


@pytest.mark.parametrize("form", [HERMES, MISTRAL_NAMED, MISTRAL_LIST], ids=lambda form: form.name)
def test_strict_calls_may_stand_between_text(form: CallFormat) -> None:
    part = strict_calls(form, [function("f", WHOLE, strict=True)], is_one=False)
    assert accepts(part, f"So {form.spelling.of(ONE)} and {form.spelling.of(ONE)}.")
    assert not accepts(part, f"So {form.spelling.of(ONE)} and {form.spelling.of(BAD)}.")


def test_a_list_of_calls_is_no_way_around() -> None:
    part = strict_calls(JSON, [function("f", WHOLE, strict=True)], is_one=False)
    assert not accepts(part, '[{"name": "f", "arguments": {}}]')


def test_a_tag_of_llama_is_no_way_around() -> None:
    part = strict_calls(LLAMA, [function("f", WHOLE, strict=True)], is_one=False)
    assert not accepts(part, 'So <|python_tag|>{"name": "f", "parameters": {}}')


@in_each_format
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_is_read_as_a_call_is_a_strict_one(form: CallFormat, seed: int) -> None:
    text = random_text(strict_calls(form, [function("f", WHOLE, strict=True)], is_one=False), seed)
    for part in parse(form.read, text, functions={"f": WHOLE}):
        if isinstance(part, ToolCall):
            jsonschema.validate(json.loads(part.arguments), WHOLE)
        else:
            assert isinstance(part, Content)


mark_pieces = st.sampled_from(["<ab>", "<ab", "<", "a", "<a", "x", "\n", ">", "b>"])


@given(st.lists(mark_pieces, max_size=8).map("".join))
def test_text_without_a_mark_is_all_other_text(text: str) -> None:
    assert (re.fullmatch(_text_without("<ab>"), text) is None) == ("<ab>" in text)


@pytest.mark.parametrize("form", LEARNED.values(), ids=LEARNED)
@pytest.mark.parametrize(
    "values", [{}, {"a": 1}, {"b": 2}, {"b": 2, "c": 3}, {"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}]
)
def test_optional_arguments_may_be_left_out_and_required_ones_not(form: CallFormat, values: dict[str, int]) -> None:
    properties = {name: {"type": "integer"} for name in "abc"}
    schema = {"type": "object", "properties": properties, "required": ["b"], "additionalProperties": False}
    part = calls_only(form, [function("f", schema)], is_one=True)
    assert accepts(part, form.spelling.of([("f", json.dumps(values))])) == ("b" in values)
