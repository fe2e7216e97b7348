"""The types of a function's arguments, for models that write arguments as text without saying what they are."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from server.tools.incremental_text import NotACall
from server.tools.json_text import json_text
from server.tools.literals import literal_json

Schema = Mapping[str, Any]

ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
STRING = frozenset({"string"})
_MAX_REFERENCES = 20


def types_of_argument(schema: Schema, name: str) -> frozenset[str]:
    """Returns the types that the schema of a function's arguments allows for the argument of this name."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    return types_of(
        resolved(properties.get(name, others) if isinstance(properties, Mapping) else others, schema), schema
    )


def resolved(schema: Any, root: Schema) -> Any:
    """Returns what `$ref` in a schema leads to; an empty schema if it leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = _target(str(schema["$ref"]), root)
    return {}


def _target(reference: str, root: Schema) -> Any:
    found: Any = root
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name, {}) if isinstance(found, Mapping) else {}
    return found


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """Returns the types that a schema allows: all of them where it is malformed, or goes on and on."""
    return _types_of(schema, root, 0, {})


def _types_of(schema: Any, root: Schema, depth: int, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """`known` has the types of the schemas that were met, by their identity: each is looked at once, however many
    references lead to it, also to itself."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return ANY
    if id(schema) in known:
        return known[id(schema)]
    types = known[id(schema)] = ANY
    match schema.get("type"):
        case str(name):
            types &= {name}
        case list(names):
            types &= {name for name in names if isinstance(name, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        types &= frozenset[str]().union(*map(_types_of_value, values))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list):
            of_each = (_types_of(resolved(each, root), root, depth + 1, known) for each in options)
            types &= frozenset[str]().union(*of_each)
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, list) else ():
        types &= _types_of(resolved(part, root), root, depth + 1, known)
    known[id(schema)] = types | {"integer"} if "number" in types else types
    return known[id(schema)]


def value_json(text: str, types: frozenset[str]) -> str:
    """Returns a value written as text as JSON of one of these types if it can be read as such, else as a string."""
    if types == STRING:
        return json_text(text)
    written = _written_json(text.strip(), "string" not in types)
    if written is None or ("string" in types and not _types_of_value(json.loads(written)) & (types - STRING)):
        return json_text(text)
    return written


def _written_json(text: str, may_be_python: bool) -> str | None:
    """Returns the text if it is JSON, or the JSON of a literal of Python, if it may be one; else None."""
    try:
        json.loads(text, parse_constant=_refuse)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return literal_json(text) if may_be_python else None
    except NotACall:
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _types_of_value(value: Any) -> frozenset[str]:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return STRING
        case None:
            return frozenset({"null"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})
