"""Whether no value satisfies two of several schemas, as far as that shows in types and constants."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from engine.grammar.exact_numbers import types_of_value
from engine.grammar.schema_keywords import types_of
from engine.grammar.schema_tree import Schema


def are_disjoint(schemas: list[Schema], definitions: Mapping[str, Schema]) -> bool:
    """Whether it shows that no value satisfies two of the schemas."""
    resolved = [_resolved(schema, definitions) for schema in schemas]
    return all(_differ(one, other, definitions) for one, other in combinations(resolved, 2))


def _differ(one: Schema, other: Schema, definitions: Mapping[str, Schema]) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    if not _kinds(one) & _kinds(other):
        return True
    if _differ_in_constants(one, other):
        return True
    if not _kinds(one) & _kinds(other) <= {"object"}:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    pairs = [
        (one.get("properties", {}).get(name, True), other.get("properties", {}).get(name, True)) for name in shared
    ]
    return any(_differ_in_constants(_resolved(a, definitions), _resolved(b, definitions)) for a, b in pairs)


def _differ_in_constants(one: Schema, other: Schema) -> bool:
    values, others = _constants(one), _constants(other)
    return values is not None and others is not None and not any(value in others for value in values)


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    types, values = types_of(schema), _constants(schema)
    if isinstance(values, list):
        types &= frozenset[str]().union(*map(types_of_value, values))
    return types | {"integer"} if "number" in types else types


def _constants(schema: Schema) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _resolved(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Returns the schema that a reference leads to, over other references, too."""
    seen = set[str]()
    while isinstance(schema, Mapping) and "$ref" in schema and schema["$ref"] not in seen:
        seen.add(schema["$ref"])
        schema = definitions[schema["$ref"]]
    return schema
