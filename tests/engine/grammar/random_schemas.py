"""Random satisfiable JSON schemas, over all supported keywords."""

from copy import deepcopy
from random import Random
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-c]{2,4}$", "^x", "[0-9]$", "^(ab|cd)*$", r"^\d{3}-\d{4}$", "é")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
NAMES = ("a", "b c", 'q"uote', "naïve", "x/y", "")
KEYWORDS = (
    *("type", "enum", "const", "format", "pattern", "$ref", "$defs", "anyOf", "allOf", "items", "prefixItems"),
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "uniqueItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxItems"),
)
VALUES = (None, True, 0, -7, 1.5, "text", 'q"\\\n', "é😀", [], [1, [None]], {}, {"k": {"l": [False]}})


def random_schema(rng: Random) -> Schema:
    """Returns a random schema with `$defs`, some of which refer to themselves."""
    tree = {
        "type": "object",
        "properties": {"leaf": _schema(rng, 0), "more": _children()},
        "additionalProperties": False,
    }
    return {**_schema(rng, 3), "$defs": {"leaf": _schema(rng, 0), "tree": tree}}


def broken_schema(rng: Random) -> Schema:
    """Returns a random schema with a random value for one keyword, which may be invalid there or beside the others."""
    schema = deepcopy(random_schema(rng))
    rng.choice(_objects_in(schema))[rng.choice(KEYWORDS)] = deepcopy(rng.choice(VALUES))
    return schema


def _objects_in(value: Any) -> list[Schema]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, dict) else []
    return own + [each for child in children for each in _objects_in(child)]


def _children() -> Schema:
    return {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}


def _schema(rng: Random, depth: int) -> Schema:
    simple = (_null, _boolean, _integer, _number, _string, _patterned, _formatted, _enum, _const)
    nested = (_array, _tuple, _object, _map, _any_of, _all_of, _reference, _types)
    make = rng.choice(nested if depth and rng.random() < 0.7 else simple)
    return make(rng, depth)


def _null(rng: Random, depth: int) -> Schema:
    return {"type": "null"}


def _boolean(rng: Random, depth: int) -> Schema:
    return {"type": "boolean", "description": "yes or no"}


def _integer(rng: Random, depth: int) -> Schema:
    low = rng.randint(-1200, 1200)
    bounds = {"minimum": low, "maximum": low + rng.randint(10, 500)}
    exclusive = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(12, 500)}
    return {"type": "integer", **rng.choice(({}, bounds, exclusive, {**bounds, "multipleOf": rng.randint(1, 10)}))}


def _number(rng: Random, depth: int) -> Schema:
    low = round(rng.uniform(-100, 100), rng.randint(0, 3))
    bounds = {"minimum": low, "maximum": round(low + rng.choice((0.5, 1, 99.25)), 3)}
    exclusive = {"exclusiveMinimum": low, "exclusiveMaximum": round(low + rng.choice((1, 10)), 3)}
    return {"type": "number", **rng.choice(({}, bounds, exclusive, {"minimum": low}, {"maximum": low}))}


def _string(rng: Random, depth: int) -> Schema:
    shortest = rng.randint(0, 4)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 8)}


def _patterned(rng: Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _formatted(rng: Random, depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _enum(rng: Random, depth: int) -> Schema:
    return {"enum": rng.sample(VALUES, rng.randint(1, 4))}


def _const(rng: Random, depth: int) -> Schema:
    return {"const": rng.choice(VALUES)}


def _array(rng: Random, depth: int) -> Schema:
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(0, 2),
    }


def _tuple(rng: Random, depth: int) -> Schema:
    items = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, len(items))}


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    rest = rng.choice((False, False, True, _schema(rng, 0)))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": rest,
    }


def _map(rng: Random, depth: int) -> Schema:
    patterns = {"^[a-z]{1,3}$": _schema(rng, depth - 1), "^[0-9]{2}$": _schema(rng, 0)}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False, "maxProperties": 2}


def _any_of(rng: Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"type": "integer", "maximum": low + 30}], "title": "T"}


def _reference(rng: Random, depth: int) -> Schema:
    return {"$ref": rng.choice(("#/$defs/leaf", "#/$defs/tree"))}


def _types(rng: Random, depth: int) -> Schema:
    return {"type": rng.sample(("null", "boolean", "integer", "string"), 2), "maxLength": 5}
