"""The texts that the parts of a grammar accept, how parts combine, and what is refused."""

import contextlib
import string
from functools import reduce
from random import Random
from typing import Any

import pytest

from engine.core.errors import GrammarError
from engine.grammar.lark import (
    ANY_TEXT,
    JSON_OBJECT,
    MAX_GRAMMAR_BYTES,
    JsonSchema,
    Lark,
    Literal,
    OneOf,
    Part,
    Regex,
    Repeat,
    Sequence,
    TextUntil,
    choice,
    to_lark,
)
from tests.engine.grammar.grammars import accepted, accepts
from tests.engine.grammar.random_schemas import broken_schema

NAMED = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
OTHER = {**NAMED, "properties": {"b": {"const": 2}}, "required": ["b"]}
CALL = Sequence((TextUntil("<call>"), JsonSchema(NAMED), Literal("</call>")))


@pytest.mark.parametrize(
    "text", ["a", 'q"u\\o\nte\t/x/', "é😀\u2028", "%json {}", "#//", "/\r\0\x7f\x1fé", "{0}", "a|b"]
)
def test_a_literal_is_its_text_and_no_other(text: str) -> None:
    assert accepted(Literal(text), text, text + " ", text[:-1]) == [text]


def test_a_choice_is_one_of_its_options() -> None:
    assert accepted(choice(["yes", "no", "", "yes!"]), "yes", "no", "", "yes!", "ye", "yesno") == [
        "yes",
        "no",
        "",
        "yes!",
    ]


def test_options_are_texts_not_expressions() -> None:
    options = [*string.printable, "a.c", "[a]", "\\d", "x{2}", "^$", "(b|c)", "é|è", "\x00", "\x7f", "%json {}", "#//"]
    assert accepted(choice(options), *options) == options
    assert accepted(choice(options), "abc", "11", "xx", "", "bc", "é", "%json", "#/") == []


def test_there_may_be_thousands_of_options() -> None:
    options = [f"option {number} of them" for number in range(4000)]
    assert accepted(choice(options), options[0], options[-1], "option 4000 of them") == [options[0], options[-1]]


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a/b", "a/b", "a/"),
        ("^ab$", "ab", "xab"),
        ("a|b", "b", "ab"),
        (r"\d", "5", "٣"),
        ("[/\"']+", "/'\"", "a"),
        ("", "", "a"),
    ],
)
def test_a_regex_matches_the_whole_text(pattern: str, good: str, bad: str) -> None:
    assert accepted(Regex(pattern), good, bad) == [good]


def test_any_json_object_is_an_object() -> None:
    texts = ["{}", '{"a": [1, {"b": null}], "c": "\\n"}', "[]", "1", "{"]
    assert accepted(JSON_OBJECT, *texts) == texts[:2]


def test_json_has_one_space_at_most_and_only_after_separators() -> None:
    texts = ['{"a": [1, 2]}', '{"a":[1,2]}', '{"a":  1}', '{ "a":1}', '{"a":1 }', ' {"a":1}', '{"a":1}\n', '{"a":\n1}']
    assert accepted(JSON_OBJECT, *texts) == texts[:2]


def test_alternatives_may_begin_alike() -> None:
    either = OneOf((JsonSchema(NAMED), JsonSchema(OTHER)))
    assert accepted(either, '{"a":1}', '{"b":2}', '{"a":2}', '{"a":1}{"b":2}') == ['{"a":1}', '{"b":2}']


@pytest.mark.parametrize(
    ("bounds", "counts"), [((0, None), [0, 1, 2, 3]), ((1, None), [1, 2, 3]), ((1, 2), [1, 2]), ((2, 2), [2])]
)
def test_repetitions_are_counted(bounds: tuple[int, int | None], counts: list[int]) -> None:
    part = Repeat(choice(["x", "y"]), *bounds)
    assert [count for count in range(4) if accepts(part, "xyx"[:count])] == counts


def test_text_runs_until_its_end_is_seen_first() -> None:
    assert accepted(TextUntil("<t>"), "a < b\n<t>", "<t>", "<t><t>", "a") == ["a < b\n<t>", "<t>"]


def test_calls_may_stand_in_free_text() -> None:
    part = Sequence((Repeat(CALL), ANY_TEXT))
    good = ["no call", "", '<call>{"a": 1}</call>', 'x <call>{"a":1}</call>\ny <call>{"a":1}</call> z']
    assert accepted(part, *good) == good


def test_a_call_that_has_begun_must_be_whole() -> None:
    assert accepted(CALL, 'x<call>{"a":2}</call>', 'x<call>{"a":1}', "x<call>") == []


def test_parts_nest() -> None:
    part = Sequence(
        (Literal("["), Repeat(OneOf((Sequence((Literal("("), Regex("[0-9]"), Literal(")"))), CALL))), Literal("]"))
    )
    good = ["[]", '[(1)(2)x<call>{"a": 1}</call>]']
    assert accepted(part, *good, "[(1]", "[(12)]") == good


def test_equal_parts_give_equal_grammars() -> None:
    assert to_lark(CALL) == to_lark(Sequence((TextUntil("<call>"), JsonSchema(dict(NAMED)), Literal("</call>"))))


def test_a_schema_cannot_relax_the_compiler() -> None:
    loose = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "object"}
    assert accepted(JsonSchema(loose), '{"a":1}', '{"a" :   1}') == ['{"a":1}']


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" // %json\n',
        'start: "%json" /%llguidance/',
        "start: A\nA: /a/\n%ignore / /\n",
        "start: /(?x)a # %json\n b/",
        'start: "\\"%json\\\\" /\\/%json/ <%json>',
    ],
)
def test_a_clients_grammar_is_taken_as_it_is(text: str) -> None:
    assert to_lark(Lark(text)) is text


@pytest.mark.parametrize(
    "text",
    [
        'start: %json {"type": "object"}',
        '%llguidance {"no_forcing": false}\nstart: "a"',
        'start: / "/ %json {"type": "object"}',
        'start: <"> %json {"type": "object"}',
        'start: "\\\\" %json {"type": "object"}',
    ],
)
def test_a_clients_grammar_has_no_directives_that_get_around_checks(text: str) -> None:
    with pytest.raises(GrammarError, match="must not contain %"):
        to_lark(Lark(text))


@pytest.mark.parametrize("text", ['"', '"a\\"', '"a\n"', "/", "/a\\/", '"' + 60_000 * '\\"', "/" + 60_000 * "\\/"])
def test_a_clients_grammar_has_no_string_or_expression_without_an_end(text: str) -> None:
    with pytest.raises(GrammarError, match="has no end"):
        to_lark(Lark("start: " + text))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Literal("\ud800"), "lone surrogates"),
        (choice(["ok", "\udfff"]), "lone surrogates"),
        (Literal("x" * MAX_GRAMMAR_BYTES), "takes 131081 bytes as a grammar; 131072 are allowed"),
        (choice([f"option {number}" for number in range(20_000)]), "131072 are allowed"),
        (JsonSchema({"enum": ["x" * MAX_GRAMMAR_BYTES]}), "131072 are allowed"),
        (JsonSchema({"maximum": float("inf")}), "a number that JSON has not"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_cannot_be_written_is_refused(part: Part, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        to_lark(part)


def refusal(schema: dict[str, Any]) -> str:
    with pytest.raises(GrammarError) as error:
        to_lark(JsonSchema(schema))
    return str(error.value)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"uniqueItems": True}, "/uniqueItems"),
        ({"properties": {"a/b~": {"items": {"not": {}}}}}, "/properties/a~1b~0/items/not"),
        ({"anyOf": [{}, {"contains": {}}]}, "/anyOf/1/contains"),
        ({"prefixItems": [{"format": "regex"}]}, "/prefixItems/0/format"),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"additionalProperties": {"if": {}, "then": {}}}}},
            "/$defs/x/additionalProperties/if",
        ),
        ({"patternProperties": {"^a": {"dependentRequired": {"b": ["c"]}}}}, "/patternProperties/^a/dependentRequired"),
        ({"items": {"$ref": "https://example.com/x"}}, "/items/$ref"),
        ({"allOf": [{"minProperties": 2}]}, "/allOf/0/minProperties"),
        ({"oneOf": [{"format": "uri-reference"}]}, "/oneOf/0/format"),
        ({"items": {"format": ["date"]}}, "/items/format"),
        ({"format": {"date": 1}}, "/format"),
        ({"items": {"exclusiveMinimum": 3, "maximum": 3.5}}, "/items/exclusiveMinimum"),
        ({"exclusiveMaximum": -97.0, "minimum": -97.5}, "/exclusiveMaximum"),
        ({"items": [{}, {"minProperties": 3}]}, "/items/1/minProperties"),
        (
            {"$ref": "#/components/x", "components": {"x": {"exclusiveMinimum": 2, "maximum": 2.5}}},
            "/components/x/exclusiveMinimum",
        ),
        ({"$ref": "#/a", "a": {"items": {"$ref": "#/b%7E1c/0"}}, "b/c": [{"not": {}}]}, "/b%7E1c/0/not"),
        ({"$ref": "#/a/1", "a": [{}]}, "/$ref"),
        ({"$ref": "#/a/x", "a": [{}]}, "/$ref"),
        ({"$ref": "#/type/x", "type": "object"}, "/$ref"),
        ({"$ref": "#a", "$defs": {"x": {"$anchor": "a"}}}, "/$ref"),
        ({"anyOf": [{"properties": {"a": {}}, "required": [None]}]}, "/anyOf/0/required"),
        ({"required": "a"}, "/required"),
        ({"items": {"enum": 10**400}}, "/items/enum"),
        ({"prefixItems": {"type": "integer"}, "items": {"minimum": 2**60}}, "/prefixItems"),
    ],
)
def test_what_cannot_be_enforced_is_named_with_its_place(schema: dict[str, Any], path: str) -> None:
    assert f"schema's {path} " in refusal(schema)


def test_no_value_in_a_schema_is_more_than_a_refusal() -> None:
    num_accepted = 0
    for seed in range(2000):
        with contextlib.suppress(GrammarError):
            to_lark(JsonSchema(broken_schema(Random(seed))))
            num_accepted += 1
    assert 1000 < num_accepted < 2000


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False, "unevaluatedItems": True},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        {"dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}, "if": {"type": "null"}, "minContains": 1},
        {"$defs": {"unused": {"not": {}}}, "definitions": {"unused": {"format": "regex"}}, "additionalItems": False},
        *({"type": kind, "format": kind} for kind in ("string", "number")),
        *({"type": "string", "format": name} for name in ("password", "binary", "byte", "path", "int32")),
        *({"type": ["number", "null"], "format": name} for name in ("double", "float", "int32", "int64", "email")),
        {"title": "T", "description": "not if then", "default": {"not": 1}, "examples": [{"if": 1}], "$schema": "s"},
        {"const": {"not": {"uniqueItems": False}}},
        {"enum": [{"format": "binary"}]},
        {"properties": {"not": {"type": "string"}, "format": {"const": 3}}},
        {"minProperties": 2, "required": ["a", "b"]},
        {"minProperties": 1},
        {"exclusiveMinimum": 3, "maximum": 4},
        {"exclusiveMinimum": 3.25, "maximum": 3.5},
        {"minimum": 3, "maximum": 3.5},
    ],
)
def test_what_restricts_nothing_is_no_reason_to_refuse(schema: dict[str, Any]) -> None:
    to_lark(JsonSchema(schema))


def test_keywords_that_are_null_are_absent_and_null_stays_a_value() -> None:
    names = ["required", "properties", "enum", "minimum", "maxLength", "pattern", "format", "not", "anyOf", "items"]
    nothing = dict.fromkeys([*names, "additionalProperties", "uniqueItems", "multipleOf", "$ref"])
    deep = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string", **nothing}}}}
    assert accepted(JsonSchema({**deep, "maxItems": None}), '[{"a":"b"}]', '[{"a":5}]') == ['[{"a":"b"}]']
    assert accepted(JsonSchema({"const": None}), "null", "1") == ["null"]
    assert accepted(JsonSchema({"enum": [None, {"required": None}]}), "null", '{"required":null}', "{}") == [
        "null",
        '{"required":null}',
    ]


def test_references_are_followed_wherever_they_lead() -> None:
    schema = {"type": "array", "items": {"$ref": "#/components/x/0"}, "components": {"x": [{"type": "integer"}]}}
    assert accepted(JsonSchema(schema), "[1]", '["a"]') == ["[1]"]
    chain = {str(number): {"$ref": f"#/parts/{number + 1}"} for number in range(2000)}
    assert "/parts/2000/not " in refusal({"$ref": "#/parts/0", "parts": {**chain, "2000": {"not": {}}}})


def test_constants_are_kept_whatever_they_are_called() -> None:
    assert accepted(JsonSchema({"const": {"uniqueItems": False}}), '{"uniqueItems":false}', "{}") == [
        '{"uniqueItems":false}'
    ]


def test_properties_are_no_keywords_whatever_they_are_called() -> None:
    banned = {"properties": {"uniqueItems": False}, "additionalProperties": True, "minProperties": 1}
    assert accepted(JsonSchema(banned), '{"uniqueItems":3}', '{"a":3}') == ['{"a":3}']
    closed = {"properties": {"unevaluatedItems": True}, "additionalProperties": False, "minProperties": 1}
    assert accepted(JsonSchema(closed), '{"unevaluatedItems":3}', '{"a":3}') == ['{"unevaluatedItems":3}']
    unread = {"type": "array", "uniqueItems": False}
    for name in ("default", "const", "enum", "examples"):
        assert accepts(JsonSchema({"properties": {name: unread}, "required": [name]}), f'{{"{name}":[1]}}')


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 10**400])
def test_no_number_is_too_large_to_be_refused(number: float) -> None:
    schema = {"exclusiveMinimum": number, "maximum": 0.5, "minimum": number, "minProperties": number}
    assert "/minProperties must not" in refusal(schema) or "a number that JSON has not" in refusal(schema)
    to_lark(JsonSchema({**dict.fromkeys(schema, -1e30), "maximum": 0.5, "minProperties": 0.0}))


def test_whole_numbers_are_whole_numbers() -> None:
    lengths = {"type": "string", "minLength": 2.0, "maxLength": 3.0}
    assert accepted(JsonSchema(lengths), '"a"', '"ab"', '"abc"', '"abcd"') == ['"ab"', '"abc"']
    counts = {"type": "array", "minItems": 1.0, "maxItems": 1e0, "items": {"type": "integer", "minimum": 3.0}}
    assert accepted(JsonSchema(counts), "[]", "[3]", "[2]", "[3,3]") == ["[3]"]


@pytest.mark.parametrize("wrap", [lambda inner: {"items": inner}, lambda inner: {"enum": [inner]}])
def test_depth_is_bounded_before_anything_recurses(wrap: Any) -> None:
    deep = reduce(lambda inner, _: wrap(inner), range(100_000), {"type": "null"})
    assert "levels deep" in refusal(deep)
