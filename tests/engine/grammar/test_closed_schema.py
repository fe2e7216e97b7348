"""Objects have the properties that their schemas name, each once, unless those say that there may be others."""

import json
from typing import Any

import pytest

from engine.grammar.lark import JsonSchema
from tests.engine.grammar.grammars import accepted

A, B, C = ({"properties": {name: {"type": "null"}}} for name in "abc")
BASE = {"$defs": {"base": {**A, "required": ["a"]}}}
BASE_OF_ITSELF = {"$defs": {"t": {"allOf": [{"properties": {"a": {"$ref": "#/$defs/t"}}}, B]}}, "$ref": "#/$defs/t"}


def objects(*texts: str) -> list[str]:
    """Returns objects with these properties, all null."""
    return ["{" + ",".join(f'"{name}":null' for name in text) + "}" for text in texts]


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        (A, ["", "a"]),
        ({"properties": {}}, [""]),
        ({**A, "required": ["b"]}, ["ab", "b"]),
        ({"allOf": [A, B]}, ["", "a", "ab", "b"]),
        ({"allOf": [{"$ref": "#/$defs/base"}, B], **BASE}, ["a", "ab"]),
        ({"$ref": "#/$defs/base", **B, **BASE}, ["a", "ab"]),
        ({"$ref": "#/$defs/base", **BASE}, ["a"]),
        ({**A, "anyOf": [{**B, "required": ["b"]}, {**C, "required": ["c"]}]}, ["ab", "b", "c"]),
        ({"anyOf": [{**A, "required": ["a"]}, B]}, ["", "a", "b"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_objects_have_the_properties_that_are_named(schema: dict[str, Any], good: list[str]) -> None:
    texts = objects("", "a", "ab", "ba", "aa", "b", "c")
    assert accepted(JsonSchema({"type": "object", **schema}), *texts) == [
        each for each in texts if each in objects(*good)
    ]


def test_objects_within_are_closed_too() -> None:
    outer = {"type": "object", "properties": {"o": {"type": "array", "items": {"type": "object", **A}}}}
    texts = ['{"o":[{}]}', '{"o":[{"a":null}]}', '{"o":[{"b":null}]}', '{"o":[],"p":1}']
    assert accepted(JsonSchema(outer), *texts) == texts[:2]
    texts = ['{"a":{"b":null}}', '{"a":{"a":{"b":null}},"b":null}', '{"a":{"c":null}}']
    assert accepted(JsonSchema(BASE_OF_ITSELF), *texts) == texts[:2]


def test_an_object_may_have_others_if_it_says_so() -> None:
    texts = objects("", "a", "ab", "ba", "b", "c")
    for schema in ({**A, "additionalProperties": True}, {"allOf": [A, {**B, "additionalProperties": True}]}):
        accepted_texts = accepted(JsonSchema({"type": "object", **schema}), *texts)
        assert objects("c")[0] in accepted_texts and objects("ab")[0] in accepted_texts
    named = {"type": "object", "patternProperties": {"^[ab]$": {}}}
    assert accepted(JsonSchema(named), *texts) == texts[:-1]


def test_an_object_that_names_no_property_may_have_any() -> None:
    texts = objects("", "a", "ab")
    assert accepted(JsonSchema({"type": "object"}), *texts) == texts
    assert accepted(JsonSchema({"type": "object", "additionalProperties": {"type": "null"}}), *texts) == texts


def test_an_open_schema_leaves_objects_open_that_do_not_say() -> None:
    texts = objects("", "a", "ab", "b")
    assert accepted(JsonSchema({"type": "object", **A}, is_open=True), *texts) == texts
    closed = {"type": "object", **A, "additionalProperties": False}
    assert accepted(JsonSchema(closed, is_open=True), *texts) == texts[:2]
