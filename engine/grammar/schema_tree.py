"""A schema as a tree of schemas, apart from the definitions that its `$ref`s lead to."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Schema = Any
"""A schema as JSON has it: an object, or true or false."""

MAPS_OF_SCHEMAS = ("properties", "patternProperties")
LISTS_OF_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
SCHEMAS = ("items", "additionalProperties")
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
"""The keywords whose schemas describe the same value as the schema that they stand in."""


@dataclass(frozen=True, slots=True)
class FlatSchema:
    """A schema whose references all lead to `definitions`, by the text of the reference."""

    root: Schema
    definitions: Mapping[str, Schema]

    def changed(self, change: Callable[[Schema], Schema]) -> "FlatSchema":
        """Returns the flat schema with another root and definitions."""
        return FlatSchema(change(self.root), {name: change(each) for name, each in self.definitions.items()})


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yields the schemas directly within a schema, each with its place, a JSON pointer from there."""
    if not isinstance(schema, Mapping):
        return
    for keyword in SCHEMAS:
        if isinstance(schema.get(keyword), Mapping | bool):
            yield f"/{keyword}", schema[keyword]
    for keyword in MAPS_OF_SCHEMAS:
        named = schema.get(keyword)
        for name, part in named.items() if isinstance(named, Mapping) else ():
            yield f"/{keyword}/{escaped_name(name)}", part
    for keyword in LISTS_OF_SCHEMAS:
        listed = schema.get(keyword)
        for index, part in enumerate(listed if isinstance(listed, list) else ()):
            yield f"/{keyword}/{index}", part


def rebuilt(schema: Mapping[str, Any], change: Callable[[str, Schema], Schema]) -> dict[str, Any]:
    """Returns the schema with others in place of those directly within it: what `change` makes of a keyword and a
    schema under it."""
    return {keyword: _rebuilt(keyword, value, change) for keyword, value in schema.items()}


def _rebuilt(keyword: str, value: Any, change: Callable[[str, Schema], Schema]) -> Any:
    if keyword in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
        return {name: change(keyword, part) for name, part in value.items()}
    if keyword in LISTS_OF_SCHEMAS and isinstance(value, list):
        return [change(keyword, part) for part in value]
    return change(keyword, value) if keyword in SCHEMAS else value


def everywhere(schema: Schema) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every schema object within a schema, the schema itself included, with its place."""
    places = [("", schema)]
    while places:
        path, part = places.pop()
        if isinstance(part, Mapping):
            yield path, part
            places += [(path + step, inner) for step, inner in reversed(list(subschemas(part)))]


def flattened(schema: Mapping[str, Any]) -> FlatSchema:
    """Returns the flat schema of one whose references all lead somewhere; what none leads to is left out."""
    definitions = dict[str, Schema]()
    pending: list[Schema] = [schema]
    while pending:
        for _, part in everywhere(pending.pop()):
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in definitions:
                definitions[reference] = target(schema, reference)
                pending.append(definitions[reference])
    return FlatSchema(schema, definitions)


def target(schema: Any, reference: str) -> Schema:
    """Returns what `#` or `#/...` points to, which may be outside the places of schemas: `#/components/schemas/x`.
    Raises LookupError, TypeError or ValueError if that is nothing."""
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        schema = schema[int(name) if isinstance(schema, list) else name]
    return schema


def escaped_name(name: str) -> str:
    """Returns the name as a token of a JSON pointer (RFC 6901), cut to 100 characters."""
    return name.replace("~", "~0").replace("/", "~1")[:100]
