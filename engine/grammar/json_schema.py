"""The part of JSON Schema that can be enforced token by token. Other keywords are refused, with their place.

The dialect is Draft 2020-12, as far as llguidance compiles it (docs/json_schema.md of guidance-ai/llguidance).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from engine.core.errors import GrammarError

MAX_DEPTH = 100  # of the schema's own JSON

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

# Keywords that restrict a value and cannot be enforced here. Keywords that JSON Schema does not define are ignored.
UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("propertyNames", "contains", "minContains", "maxContains", "uniqueItems", "additionalItems"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
_OTHER_BOUNDS = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}
_NEUTRAL: Mapping[str, Any] = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalProperties")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises GrammarError, with a JSON pointer to the place, if part of the schema cannot be enforced."""
    _check_depth(schema)
    for path, part in _subschemas(schema):
        for keyword in part:
            if keyword in UNSUPPORTED and not _is_neutral(keyword, part[keyword]):
                raise GrammarError(f"the schema's {path}/{keyword} is not supported")
        _check_format(path, part)
        _check_reference(path, part)
        _check_min_properties(path, part)
        _check_exclusive_bounds(path, part)


def compilable(schema: Any) -> Any:
    """Returns the schema without unsupported keywords whose values restrict nothing, and with exclusive bounds that
    still hold for numbers parsed as floats."""
    if isinstance(schema, list):
        return [compilable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _compilable(key, value) for key, value in schema.items() if not _is_neutral(key, value)}


def _compilable(keyword: str, value: Any) -> Any:
    if keyword in ("const", "enum", "default", "examples"):
        return value
    if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):  # its keys are names
        return {name: compilable(part) for name, part in value.items()}
    return compilable(_move_bound(keyword, value))


def _move_bound(keyword: str, value: Any) -> Any:
    """Moves an exclusive fractional bound inwards to the next float: JSON parsers would round a decimal right beside
    the bound to the bound itself."""
    if keyword in _OTHER_BOUNDS and isinstance(value, float) and not value.is_integer():
        return math.nextafter(value, math.inf if keyword == "exclusiveMinimum" else -math.inf)
    return value


def _is_neutral(keyword: str, value: object) -> bool:
    return keyword in _NEUTRAL and value is _NEUTRAL[keyword]


def _check_depth(schema: object) -> None:
    """Raises GrammarError if the schema is too deep. Goes by level, not by recursion, which may exhaust Python's
    stack."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep")


def _children(node: object) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list) else []


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every schema object that is compiled, the schema itself included, with the JSON pointer to it."""
    seen, places = set[int](), [("", schema)]
    while places:
        for path, part in _nested(*places.pop(), seen):
            yield path, part
            if "$ref" in part:
                places.append((part["$ref"][1:100], _target(schema, path, part["$ref"])))


def _nested(path: str, schema: Any, seen: set[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields a schema and its subschemas, with their JSON pointers, without those already `seen`."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    yield path, schema
    for keyword in _SCHEMAS:
        yield from _nested(f"{path}/{keyword}", schema.get(keyword), seen)
    for keyword in _MAPS_OF_SCHEMAS:
        named = schema.get(keyword)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            yield from _nested(f"{path}/{keyword}/{_escape(name)}", part, seen)
    for keyword in _LISTS_OF_SCHEMAS:
        listed = schema.get(keyword)
        for index, part in enumerate(listed if isinstance(listed, list) else ()):
            yield from _nested(f"{path}/{keyword}/{index}", part, seen)


def _target(schema: Any, path: str, reference: str) -> Any:
    """Returns what `#` or `#/...` points to, which may be outside the places of schemas: `#/components/schemas/x`."""
    try:
        for name in unquote(reference).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema[int(name) if isinstance(schema, list) else name]
    except (LookupError, TypeError, ValueError) as error:
        raise GrammarError(f"the schema's {path}/$ref leads nowhere") from error
    return schema


def _check_format(path: str, part: Mapping[str, Any]) -> None:
    name = part.get("format")
    if name is not None and not (isinstance(name, str) and name in FORMATS):
        raise GrammarError(f"the schema's {path}/format is {name!r:.100}; supported are {', '.join(sorted(FORMATS))}")


def _check_reference(path: str, part: Mapping[str, Any]) -> None:
    target = part.get("$ref", "#")
    if not (isinstance(target, str) and (target == "#" or target.startswith("#/"))):
        raise GrammarError(f"the schema's {path}/$ref is no pointer into the schema; only # and #/... are followed")


def _check_min_properties(path: str, part: Mapping[str, Any]) -> None:
    """Raises GrammarError for a minProperties that only additional properties could reach: their names may be generated
    twice, and a parser counts them once."""
    count, required = part.get("minProperties", 0), part.get("required", ())
    if isinstance(count, int | float) and isinstance(required, list | tuple) and count > max(1, len(required)):
        raise GrammarError(f"the schema's {path}/minProperties must not exceed the number of required properties")


def _check_exclusive_bounds(path: str, part: Mapping[str, Any]) -> None:
    """Raises GrammarError for an exclusive integer bound less than 1 from the other bound: llguidance 1.9.1 would allow
    the bound itself."""
    for excluding, others in _OTHER_BOUNDS.items():
        bound = part.get(excluding)
        if isinstance(bound, int) or (isinstance(bound, float) and bound.is_integer()):
            for other in others:
                limit = part.get(other)
                if isinstance(limit, int | float) and bound - 1 < limit < bound + 1:
                    raise GrammarError(f"the schema's {path}/{excluding} is not supported so close to {other}")


def _escape(name: str) -> str:
    """Returns the name as a token of a JSON pointer (RFC 6901), cut to 100 characters."""
    return name.replace("~", "~0").replace("/", "~1")[:100]
