"""Random schemas with numbers of many digits, and none that cannot be enforced."""

from random import Random
from typing import Any

Schema = dict[str, Any]

EDGES = (2**53, 2**63, 2**64, 10**19, 10**30)


def random_number_schema(rng: Random, depth: int = 3) -> Schema:
    """Returns a schema with large numbers somewhere, beside others."""
    simple = (_constant, _constants, _integers, _numbers, _fractions, _format, _small)
    nested = (_array, _tuple, _object, _map, _any_of)
    return rng.choice(nested if depth and rng.random() < 0.6 else simple)(rng, depth)


def random_number(rng: Random) -> float:
    large = rng.choice((-1, 1)) * (rng.choice(EDGES) + rng.randint(-3, 3))
    fraction = rng.uniform(-1, 1) * 10 ** rng.randint(-320, 308)
    return rng.choice((large, rng.randint(-(10**25), 10**25), fraction, -0.0, rng.random(), rng.randint(-9, 9)))


def _constant(rng: Random, depth: int) -> Schema:
    value = random_number(rng)
    return {"const": rng.choice((value, [value, "x"], {"a": {"b": value}, "c": [[value], None]}))}


def _constants(rng: Random, depth: int) -> Schema:
    return {"enum": [*(random_number(rng) for _ in range(rng.randint(1, 4))), "text", [random_number(rng)]]}


def _integers(rng: Random, depth: int) -> Schema:
    low = rng.choice((-1, 1)) * (rng.choice(EDGES) + rng.randint(-9, 9))
    high = low + rng.choice((3, 10**3, 10**18, 10**25))
    lower = rng.choice(({"minimum": low}, {"exclusiveMinimum": low}, {}))
    return {"type": "integer", **lower, **rng.choice(({"maximum": high}, {"exclusiveMaximum": high}, {}))}


def _numbers(rng: Random, depth: int) -> Schema:
    low = rng.choice(
        ({"minimum": -3.4e38}, {"exclusiveMinimum": 0}, {"minimum": 0.25}, {"exclusiveMinimum": -(2.0**70)})
    )
    high = rng.choice(({"maximum": 3.4028234663852886e38}, {"exclusiveMaximum": 2.0**60}, {"maximum": 2**64}))
    return {"type": rng.choice(("number", ["number", "null"])), **low, **high}


def _fractions(rng: Random, depth: int) -> Schema:
    low, high = sorted(rng.uniform(-1, 1) * 10 ** rng.randint(-9, 15) for _ in range(2))
    lower = rng.choice(({"minimum": low}, {"exclusiveMinimum": low}, {}))
    return {"type": "number", **lower, **rng.choice(({"maximum": high}, {"exclusiveMaximum": high}))}


def _format(rng: Random, depth: int) -> Schema:
    return {"type": "integer", "format": rng.choice(("int8", "int32", "int64", "uint64"))}


def _small(rng: Random, depth: int) -> Schema:
    return rng.choice(({"type": "integer", "minimum": 3, "maximum": 40}, {"type": "boolean"}, {"maxLength": 3}))


def _array(rng: Random, depth: int) -> Schema:
    fewest = rng.randint(0, 2)
    bounds = rng.choice(({}, {"minItems": fewest}, {"maxItems": 2}, {"minItems": fewest, "maxItems": fewest + 1}))
    return {"type": "array", "items": random_number_schema(rng, depth - 1), **bounds}


def _tuple(rng: Random, depth: int) -> Schema:
    items = [random_number_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    rest = rng.choice((False, random_number_schema(rng, 0)))
    return {"type": "array", "prefixItems": items, "items": rest, "minItems": rng.randint(0, len(items))}


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(("a", "b c", 'q"uote', "naïve", ""), rng.randint(1, 4))
    rest = rng.choice(({}, {"additionalProperties": False}, {"additionalProperties": random_number_schema(rng, 0)}))
    return {
        "type": "object",
        "properties": {name: random_number_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
        **rest,
    }


def _map(rng: Random, depth: int) -> Schema:
    return {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": random_number_schema(rng, 1)}


def _any_of(rng: Random, depth: int) -> Schema:
    return {"anyOf": [random_number_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))], "title": "T"}
