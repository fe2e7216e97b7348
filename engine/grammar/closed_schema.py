"""Objects without `additionalProperties` have the properties that their schema names, and no others."""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.grammar.schema_tree import IN_PLACE, FlatSchema, Schema, rebuilt

_OPEN = " (open)"  # behind a reference to a definition that is part of an object described elsewhere


def closed(flat: FlatSchema) -> FlatSchema:
    """Returns the schema with every object closed that names properties and does not say whether there may be others.

    An object that is described by several schemas together, as with `allOf`, is closed around the properties of all.
    """
    closing = _Closing(flat)
    result = flat.changed(closing.whole)
    return FlatSchema(result.root, {**result.definitions, **closing.finished()})


class _Closing:
    def __init__(self, flat: FlatSchema) -> None:
        self._flat = flat
        self._wanted = set[str]()  # definitions that are needed open

    def finished(self) -> dict[str, Schema]:
        """Returns the open definitions that were referred to."""
        done = dict[str, Schema]()
        while missing := [name for name in sorted(self._wanted) if name + _OPEN not in done]:
            for name in missing:
                done[name + _OPEN] = self._part(self._flat.definitions[name])
        return done

    def whole(self, schema: Schema) -> Schema:
        """Returns the schema of a value that no other schema describes."""
        if not isinstance(schema, Mapping):
            return schema
        if not _is_composed(schema):
            return _closed_around(self._inner(schema, self.whole), [schema])
        return _closed_around(self._part(schema), list(self._members(schema, set())))

    def _part(self, schema: Schema) -> Schema:
        """Returns the schema of a value that others describe, too: it stays open."""
        if not isinstance(schema, Mapping):
            return schema
        inner = self._inner(schema, self._part)
        if "$ref" in schema:
            self._wanted.add(schema["$ref"])
            inner["$ref"] = schema["$ref"] + _OPEN
        return inner

    def _inner(self, schema: Mapping[str, Any], in_place: Any) -> dict[str, Any]:
        return rebuilt(schema, lambda keyword, part: in_place(part) if keyword in IN_PLACE else self.whole(part))

    def _members(self, schema: Schema, seen: set[str]) -> Iterator[Mapping[str, Any]]:
        """Yields the schemas that describe the same value, the schema itself included."""
        if not isinstance(schema, Mapping):
            return
        reference = schema.get("$ref")
        if reference is not None and reference not in seen:
            seen.add(reference)
            yield from self._members(self._flat.definitions[reference], seen)
        yield schema
        for keyword in ("allOf", "anyOf", "oneOf"):
            for part in _list(schema, keyword):
                yield from self._members(part, seen)


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas together describe the value."""
    num_in_place = sum(keyword in schema for keyword in IN_PLACE)
    describes_itself = any(keyword in schema for keyword in ("properties", "patternProperties", "required"))
    return len(_list(schema, "allOf")) > 1 or num_in_place > 1 or (num_in_place > 0 and describes_itself)


def _closed_around(schema: dict[str, Any], members: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the schema, closed around the properties of all its members: those that are described, and those that are
    required without that."""
    is_described = any("properties" in member or "patternProperties" in member for member in members)
    if not is_described or any("additionalProperties" in member for member in members):
        return schema
    own, own_patterns = _map(schema, "properties"), _map(schema, "patternProperties")
    names = [name for member in members for name in (*_map(member, "properties"), *_list(member, "required"))]
    patterns = {pattern: True for member in members for pattern in _map(member, "patternProperties")}
    described = {"properties": {**own, **{name: True for name in names if name not in own}}}
    if patterns:
        described["patternProperties"] = {**patterns, **own_patterns}
    return {**schema, **described, "additionalProperties": False}


def _map(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
