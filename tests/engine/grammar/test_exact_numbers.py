"""Numbers of a schema are generated as they are written, however large or precise, or their place is refused."""

import json
import re
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema
import pytest

from engine.core.errors import GrammarError
from engine.grammar.lark import JsonSchema, to_lark
from engine.grammar.number_ranges import decimals, integers, numbers
from tests.engine.grammar.grammars import accepted
from tests.engine.grammar.random_numbers import random_number_schema
from tests.engine.grammar.random_texts import random_text

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
FLOAT32 = 3.4028234663852886e38


@pytest.mark.parametrize(
    "number",
    [
        *(2**53 + 1, -(2**53) - 1, 1234567890123456789, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, 10**30 + 1, 7),
        *(0.1, 1.5, 0.30000000000000004, 0.10442422284151531, 12345678901234.567, 1e22, 1.5e300, 5e-324, -2.5e-7, -0.0),
    ],
)
@pytest.mark.parametrize("place", ["%s", '[%s, "x"]', '{"a": {"b": [null, %s]}}'])
def test_a_constant_is_the_number_that_is_written(number: float, place: str) -> None:
    value = json.loads(place % json.dumps(number))
    for schema in ({"const": value}, {"enum": [value]}, {"enum": [value], "type": ["number", "array", "object"]}):
        assert repr(json.loads(random_text(JsonSchema(schema), Random(0)) or "")) == repr(value)


def test_a_forced_value_is_no_neighbour_of_it() -> None:
    record = {"type": "object", "properties": {"id": {"const": 1234567890123456789}}, "required": ["id"]}
    texts = ['{"id": 1234567890123456789}', '{"id": 1234567890123456768}', '{"id": 1234567890123456788}']
    assert accepted(JsonSchema(record), *texts) == texts[:1]


def test_random_texts_of_large_numbers_satisfy_their_schemas() -> None:
    """The validator compares Python's numbers, which are exact."""
    num_ended = 0
    for seed in range(250):
        schema = random_number_schema(Random(seed))
        text = random_text(JsonSchema(schema), Random(seed))
        if text is not None:
            errors = jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text))
            assert [error.message for error in errors] == [], (schema, text)
            num_ended += 1
    assert num_ended > 200


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INT64, [2**63 - 1, -(2**63), 0, -1], [2**63, -(2**63) - 1, 10**19]),
        ({"type": "integer", "format": "int64"}, [2**63 - 1, -(2**63)], [2**63, -(2**63) - 1]),
        ({"type": "integer", "format": "int32", "minimum": 0}, [0, 2**31 - 1], [-1, 2**31]),
        (UINT64, [0, 2**64 - 1], [-1, 2**64]),
        ({"type": "integer", "minimum": 2**64 + 1}, [2**64 + 1, 10**40], [2**64, 0, -(2**65)]),
        ({"type": "integer", "exclusiveMaximum": -(2**53) - 1}, [-(2**53) - 2, -(10**40)], [-(2**53) - 1, 0]),
        ({"type": "number", "minimum": -FLOAT32, "maximum": FLOAT32}, [0.5, int(FLOAT32)], [int(FLOAT32) + 1]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": FLOAT32}, [0.5, 1, 1.5], [0, -1]),
        ({"type": "number", "minimum": -FLOAT32, "maximum": 0.5}, [0.5, -1, 0], [0.51, 1]),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [0.5, 1e300], []),
        ({"type": "number", "maximum": 2**60 + 1, "minimum": 2**59 - 1}, [2**60, 2**59], [2**60 + 2, 2**59 - 2]),
        ({"minimum": 2**60}, [2**60, "text", [None]], [2**60 - 1]),
        ({"type": "number", "minimum": 0.1 + 0.2}, [0.1 + 0.2, 0.4, 7, 1e15], [0.3, 0, -1]),
        ({"type": "number", "maximum": 0.1 + 0.2}, [0.1 + 0.2, 0.3, 0, -7.5], [0.30000000000000010, 0.4, 1]),
        ({"type": "number", "exclusiveMinimum": 0.1 + 0.2}, [0.4, 0.3000000000000001], [0.1 + 0.2, 0.3]),
        (
            {"type": "number", "minimum": -2.718281828459045, "exclusiveMaximum": 3.141592653589793},
            [3, -2.7],
            [3.2, -3],
        ),
        ({"type": "integer", "minimum": 0.1 + 0.2, "maximum": 3.141592653589793}, [1, 3], [0, 4]),
        ({"type": ["number", "null"], "minimum": 1.2345678901234567e-7}, [1.25e-1, None, 1], [0, -1, 0.0000001]),
        ({"minimum": 12345678901234.567, "maximum": 2**60}, [12345678901234.567, 2**60, "a"], [12345678901234.5, 1]),
        ({"enum": [2**60, 2**60 + 2, 5, 7.5], "minimum": 6, "maximum": 2**60 + 1}, [2**60, 7.5], [2**60 + 2, 5]),
    ],
)
def test_ranges_end_where_the_schema_says(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    texts = [json.dumps(value) for value in (*good, *bad)]
    assert accepted(JsonSchema(schema), *texts) == texts[: len(good)]


@pytest.mark.parametrize("seed", range(40))
def test_expressions_of_ranges_match_the_numbers_within(seed: int) -> None:
    rng = Random(seed)
    low, high = sorted(rng.randint(-(10 ** rng.randint(1, 4)), 10 ** rng.randint(1, 4)) for _ in range(2))
    for least, greatest in ((low, high), (None, high), (low, None), (low, low), (None, None)):
        whole, any_fraction = re.compile(integers(least, greatest)), re.compile(numbers(least, greatest))
        for number in (*range(low - 2, low + 3), *range(high - 2, high + 3), 0, *(rng.randint(-(10**5), 10**5),) * 9):
            assert bool(whole.fullmatch(str(number))) == is_within(number, least, greatest)
            for text in (str(number), f"{number}.0", f"{number}.5", f"{number}.999"):
                assert bool(any_fraction.fullmatch(text)) == is_within(float(text), least, greatest), text


@pytest.mark.parametrize("seed", range(40))
def test_expressions_of_decimals_match_the_numbers_within(seed: int) -> None:
    rng = Random(seed)
    low, high = sorted(Decimal(rng.randint(-3000, 3000)).scaleb(-rng.randint(0, 3)) for _ in range(2))
    step = Decimal("0.0001")
    for least, greatest in ((low, high), (None, high), (low, None), (low, low), (high, high)):
        expression = re.compile(decimals(least, greatest))
        others = (Decimal(rng.randint(-30_000, 30_000)).scaleb(-rng.randint(0, 4)) for _ in range(20))
        for number in (low, low + step, low - step, high, high + step, high - step, Decimal(0), *others):
            is_inside = (least is None or number >= least) and (greatest is None or number <= greatest)
            for text in (f"{number:f}", f"{number:f}0" if "." in f"{number:f}" else f"{number:f}.0"):
                assert bool(expression.fullmatch(text)) == is_inside, (text, expression.pattern)


def is_within(number: float, low: int | None, high: int | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


LARGE = {"const": 2**60}


def test_schemas_around_large_numbers_mean_what_they_say() -> None:
    texts = ["[]", f"[{2**60}]", f"[{2**60},null]", f"[{2**60},null,3]", f"[{2**60},3]"]
    pair = {"type": "array", "prefixItems": [LARGE, {"type": "null"}]}
    assert accepted(JsonSchema(pair), *texts) == texts[:4]
    assert accepted(JsonSchema({**pair, "items": False, "minItems": 1}), *texts) == texts[1:3]
    assert accepted(JsonSchema({**pair, "items": False, "maxItems": 1}), *texts) == texts[:2]
    node = {"properties": {"id": LARGE, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
    texts = ['{"next":null}', f'{{"id":{2**60},"next":{{"next":null}}}}', '{"id":1,"next":null}', '{"next":null,"x":1}']
    assert accepted(JsonSchema({"type": "object", **node}), *texts) == texts[:2]
    others = {"type": "object", "properties": {"id": LARGE}, "additionalProperties": {"type": "null"}}
    texts = ["{}", '{"x": null, "y": null}', f'{{"id":{2**60},"x":null}}', '{"id":null}', '{"x":1}']
    assert accepted(JsonSchema(others), *texts) == texts[:3]
    by_kind = {"oneOf": [{"const": 2**60}, {"const": 2**60 + 1}, {"type": "null"}]}
    assert accepted(JsonSchema(by_kind), str(2**60), str(2**60 + 1), "null", "1") == [
        str(2**60),
        str(2**60 + 1),
        "null",
    ]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"items": {"type": "integer", "minimum": 2**60, "multipleOf": 3}}, "/items/multipleOf"),
        ({"items": {"minimum": 1.2345678901234567e-30, "maximum": 1}}, "/items/minimum is nearer to zero"),
        ({"minimum": 0.30000000000000004, "maximum": 0.1}, "/minimum is greater"),
        ({"type": "integer", "maximum": 10**100}, "/maximum"),
        ({"type": "integer", "multipleOf": 2**32}, "/multipleOf"),
        ({"type": "number", "multipleOf": 0.07}, "/multipleOf"),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**59}, "/minimum is greater"),
        ({"type": "object", "patternProperties": {"^a": LARGE}}, "/patternProperties"),
        ({"type": "object", "maxProperties": 1, "additionalProperties": LARGE}, "/maxProperties"),
        ({"allOf": [{"type": "integer"}, LARGE]}, "/allOf"),
        ({"oneOf": [{"type": "integer"}, LARGE]}, "/oneOf"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": LARGE}}, "/minimum"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 2**60, "pattern": "x"}}}, "/$defs/a/pattern"),
        ({"const": 2**60, "type": "string"}, "/const"),
        ({"minimum": "1"}, "/minimum"),
        ({"enum": [[float("inf")]]}, "/enum"),
        ({"maxLength": 2.5}, "/maxLength"),
        ({"items": {"minItems": -1}}, "/items/minItems"),
    ],
)
def test_a_number_that_cannot_be_enforced_is_refused_with_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(f"the schema's {place}")):
        to_lark(JsonSchema(schema))


@pytest.mark.parametrize("properties", [None, []])
def test_properties_that_are_none_name_none(properties: Any) -> None:
    named = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": LARGE}
    assert accepted(JsonSchema(named), f'{{"a":{2**60}}}', "{}", '{"a":1}') == [f'{{"a":{2**60}}}']


def test_required_properties_keep_their_order() -> None:
    names = [f"x{index}" for index in range(9)]
    others = {"type": "object", "required": names, "additionalProperties": LARGE}
    assert to_lark(JsonSchema(others)) == to_lark(JsonSchema({**others, "properties": dict.fromkeys(names, LARGE)}))
