"""Schemas of arguments that models write as text: malformed ones harm nothing, and what cannot be kept is refused."""

from typing import Any

import pytest

from engine.core.errors import GrammarError
from server.tools.argument_grammar import argument_parts
from server.tools.argument_types import ANY, STRING, types_of_argument
from server.tools.call_grammar import as_text
from server.tools.spelling import LiteralArguments, TaggedArguments
from tests.server.tools.call_templates import LEARNED
from tests.server.tools.call_texts import parse, tool_calls

NOTATIONS = [
    TaggedArguments("<key>", "</key><value>", "</value>"),
    LiteralArguments("(", "=", ")", "'"),
    LiteralArguments("{", ":", "}", '<|"|>'),
]
in_each_notation = pytest.mark.parametrize("notation", NOTATIONS, ids=["tagged", "python", "marks"])


@pytest.mark.parametrize("form", ["parameters", "pairs", "attributes", "python", "braces"])
@pytest.mark.parametrize(
    "schema",
    [{"properties": None}, {"properties": []}, {"properties": {"a": {"allOf": 5}}}, {"properties": {"a": None}}],
)
def test_a_call_is_read_whatever_its_schema_is(form: str, schema: dict[str, Any]) -> None:
    text = LEARNED[form].spelling.of([("f", '{"a": "x"}')])
    assert parse(LEARNED[form].read, *text, functions={"f": schema}) == tool_calls([("f", '{"a": "x"}')])


@in_each_notation
@pytest.mark.parametrize("properties", [None, []])
def test_properties_that_are_none_ask_for_no_arguments(notation: Any, properties: Any) -> None:
    without = argument_parts(notation, {"type": "object", "properties": {}}, as_text)
    schema = {"type": "object", "properties": properties, "required": None}
    assert argument_parts(notation, schema, as_text) == without


@in_each_notation
@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("/required", {"required": "a"}),
        ("/required", {"required": [5]}),
        ("/properties/a/minLength", {"properties": {"a": {"type": "string", "minLength": "x"}}}),
        ("/properties/a/minItems", {"properties": {"a": {"type": "array", "minItems": "x"}}}),
        ("/properties/a/$ref", {"properties": {"a": {"$ref": "#/$defs/none"}}}),
        ("/properties/a/minLength", {"properties": {"a": {"minLength": 3}}}),
        ("/properties/a/required", {"properties": {"a": {"required": ["b"]}}}),
    ],
)
def test_what_cannot_be_promised_is_refused_by_its_place(notation: Any, place: str, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=place.replace("$", "\\$")):
        argument_parts(notation, schema, as_text)


@pytest.mark.parametrize("notation", [NOTATIONS[0], NOTATIONS[2]], ids=["tagged", "marks"])
@pytest.mark.parametrize("keyword", ["pattern", "enum"])
def test_a_malformed_keyword_of_a_string_is_refused(notation: Any, keyword: str) -> None:
    with pytest.raises(GrammarError, match=f"/properties/a/{keyword}"):
        argument_parts(notation, {"properties": {"a": {"type": "string", keyword: 5}}}, as_text)


def test_required_arguments_without_a_property_keep_their_order() -> None:
    names = [f"x{index}" for index in range(9)]
    open_ended = argument_parts(NOTATIONS[0], {"required": names}, as_text)
    assert open_ended == argument_parts(
        NOTATIONS[0], {"properties": {name: {} for name in names}, "required": names}, as_text
    )


def doubled(count: int) -> dict[str, Any]:
    """Returns a schema whose argument has 2 ** count alternatives, all of strings."""
    definitions: dict[str, Any] = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(count)}
    definitions[f"x{count}"] = {"type": "string"}
    return {"$defs": definitions, "properties": {"a": {"$ref": "#/$defs/x0"}}}


def test_types_behind_references_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 2}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    looked_up = list[str]()
    monkeypatch.setattr("server.tools.argument_types._target", lambda text, root: _noted(looked_up, text, root))
    assert types_of_argument(itself, "a") == ANY
    assert types_of_argument(doubled(18), "a") == STRING
    assert len(looked_up) < 50


def _noted(looked_up: list[str], reference: str, root: dict[str, Any]) -> Any:
    looked_up.append(reference)
    return root["$defs"][reference.rpartition("/")[2]]


@in_each_notation
def test_alternatives_are_bounded(notation: Any) -> None:
    argument_parts(notation, doubled(5), as_text)
    with pytest.raises(GrammarError, match="more than 64 alternatives"):
        argument_parts(notation, doubled(60), as_text)
