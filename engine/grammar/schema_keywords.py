"""The keywords of JSON Schema: which cannot be enforced, which say nothing, and how the rest is told the compiler."""

import math
from collections.abc import Mapping
from typing import Any

from engine.grammar.number_ranges import EXACT_INTEGERS
from engine.grammar.schema_tree import Schema, rebuilt

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

# Formats that JSON Schema defines and nobody here can enforce. Those that it does not define are annotations.
UNENFORCED_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
# llguidance 1.9.1 has a 29th of February in each year and a second 60 in each minute. Here leap years have the one, and
# no minute has the other.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY_OF_YEAR = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:[0-9]{{4}}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_AND_MINUTE})"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""Formats -> patterns that say the same, which the compiler is told instead."""

_INTEGER_FORMATS = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}

# Keywords that restrict a value and cannot be enforced here. Keywords that JSON Schema does not define are ignored.
UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("propertyNames", "contains", "minContains", "maxContains", "uniqueItems", "additionalItems"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
OTHER_BOUNDS = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}
_LARGEST_DOUBLE = 1.797e308  # as far as generators of schemas write it out

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
# Keywords that restrict nothing without the other one.
_NEEDS = {"if": ("then", "else"), "then": ("if",), "else": ("if",)}
_NEEDS |= {"minContains": ("contains",), "maxContains": ("contains",)}


# Keywords to which null is no value: programs write it for what they have not.
_NEVER_NULL = UNSUPPORTED | {*BOUNDS, *COUNTS, "multipleOf", "pattern", "format", "enum", "required", "properties"}
_NEVER_NULL |= {"patternProperties", "additionalProperties", "items", "prefixItems", "anyOf", "allOf", "oneOf", "$ref"}
_OF_VALUES = frozenset({"const", "enum", "default", "examples"})
_MAX_LEVELS = 200  # schemas are refused at half as many


TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types that a value may have, all if the schema names none."""
    names = schema.get("type", None)
    if isinstance(names, list):
        return frozenset(name for name in names if isinstance(name, str))
    return frozenset({names}) if isinstance(names, str) else TYPES


def without_nulls(schema: Any, levels: int = _MAX_LEVELS) -> Any:
    """Returns the schema without keywords that are null, which count as absent, as in all of a request. What is too
    deep to be a schema stays as it is."""
    if not levels:
        return schema
    if isinstance(schema, list):
        return [without_nulls(each, levels - 1) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        keyword: value if keyword in _OF_VALUES else without_nulls(value, levels - 1)
        for keyword, value in schema.items()
        if value is not None or keyword not in _NEVER_NULL
    }


def is_neutral(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether the keyword is an unsupported one that restricts nothing in this schema."""
    if keyword in _NEEDS:
        return not any(other in schema for other in _NEEDS[keyword])
    if keyword == "additionalItems":
        return not isinstance(schema.get("items"), list) or schema[keyword] is True
    value = schema[keyword]
    return any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(keyword, ()))


def compilable(schema: Schema) -> Schema:
    """Returns a checked schema without unsupported keywords, all of which restrict nothing there, with formats of
    numbers as bounds, and with exclusive bounds beyond exact integers as inclusive ones."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key not in UNSUPPORTED and not is_end(key, value)}
    for keyword in COUNTS:
        if keyword in kept:
            kept[keyword] = int(kept[keyword])
    for keyword in BOUNDS:
        if keyword in kept:
            kept[keyword] += 0  # no negative zero
    for keyword in OTHER_BOUNDS:
        if abs(kept.get(keyword, 0)) > EXACT_INTEGERS:
            kept |= _inclusive(keyword, kept.pop(keyword), kept)
    return rebuilt(_with_format(kept), lambda _, part: compilable(part))


def moved_inwards(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema with exclusive bounds that are fractions moved to the next double: JSON parsers would round a
    decimal right beside the bound to the bound itself."""
    moved = dict(schema)
    for keyword in OTHER_BOUNDS.keys() & schema.keys():
        if isinstance(moved[keyword], float) and not moved[keyword].is_integer():
            moved[keyword] = math.nextafter(moved[keyword], math.inf if keyword == "exclusiveMinimum" else -math.inf)
    return moved


def is_end(keyword: str, value: Any) -> bool:
    """Whether the value is a bound at the end of what a double can be."""
    if keyword in ("minimum", "exclusiveMinimum"):
        return bool(value <= -_LARGEST_DOUBLE)
    return keyword in ("maximum", "exclusiveMaximum") and bool(value >= _LARGEST_DOUBLE)


def _inclusive(keyword: str, bound: float, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the inclusive bound at the next number that is an integer, or can be parsed as a double."""
    is_lower = keyword == "exclusiveMinimum"
    inclusive = "minimum" if is_lower else "maximum"
    if types_of(schema) & {"integer", "number"} == {"integer"}:
        inner = int(bound) + (1 if is_lower else -1)
    else:
        inner = int(math.nextafter(bound, math.inf if is_lower else -math.inf))
    return {inclusive: (max if is_lower else min)(schema.get(inclusive, inner), inner)}


def _with_format(schema: dict[str, Any]) -> dict[str, Any]:
    name, types = schema.get("format"), types_of(schema)
    if name is None or (name in FORMATS - _PATTERNS.keys() and "string" in types):
        return schema
    plain = {key: value for key, value in schema.items() if key != "format"}
    if name in _PATTERNS and "string" in types:
        return _with_pattern(plain, _PATTERNS[name])
    if name not in _INTEGER_FORMATS or not types & {"integer", "number"}:
        return plain
    least, greatest = _INTEGER_FORMATS[name]
    return {
        **plain,
        "minimum": max(least, schema.get("minimum", least)),
        "maximum": min(greatest, schema.get("maximum", greatest)),
    }


def _with_pattern(schema: dict[str, Any], pattern: str) -> dict[str, Any]:
    """Returns the schema of texts that match this pattern, too."""
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*others, {"pattern": pattern}]} if isinstance(others, list) else schema
