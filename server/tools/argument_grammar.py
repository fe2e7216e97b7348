"""Grammars of arguments in notations other than JSON, made of the schema of a function's arguments."""

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from itertools import chain, islice
from typing import Any

from engine.core.errors import GrammarError
from engine.grammar.json_schema import check_schema
from engine.grammar.lark import (
    JsonSchema,
    Literal,
    OneOf,
    Part,
    Regex,
    Repeat,
    Rule,
    Sequence,
    TextUntil,
    TextWithout,
    escaped,
)
from engine.grammar.schema_keywords import without_nulls
from server.tools.argument_types import ANY, STRING, resolved, types_of
from server.tools.spelling import ArgumentNotation, LiteralArguments, TaggedArguments

Schema = Mapping[str, Any]
Write = Callable[[str], tuple[Part, ...]]
"""How a text is written in grammars: marks in it may be special tokens."""

_ANNOTATIONS = {"title", "description", "$schema", "$id", "$comment", "default", "examples", "deprecated", "strict"}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"} | _ANNOTATIONS
_OF_STRINGS = {"type", "enum", "const", "minLength", "maxLength", "pattern"} | _ANNOTATIONS
_MAX_BRANCHES = 64
_ANY_TEXT = "(?s:.*)"
_SINGLE_QUOTED = Regex(r"'(?:[^'\\\n]|\\['\\n])*'")
_KEY = Regex("[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def argument_parts(notation: ArgumentNotation, schema: Schema | None, write: Write) -> Part:
    """Returns a grammar of arguments that satisfy the schema, or of any without one. Raises GrammarError for a schema
    that cannot be followed in this notation."""
    schema = without_nulls(schema)
    try:
        match notation:
            case TaggedArguments():
                check_schema(schema or {})
                return _Tagged(notation, schema or {}, write).arguments(schema)
            case LiteralArguments():
                check_schema(schema or {})
                return _Literals(notation, schema or {}, write).arguments(schema)
            case _:
                return JsonSchema(schema or {"type": "object"})
    except RecursionError as error:
        raise GrammarError("a schema that refers to itself is not supported by this model's format of calls") from error


def text_up_to(mark: str, write: Write, pattern: str = _ANY_TEXT) -> Part:
    """Returns a grammar of text that matches the pattern, up to and with the first `mark`, however that is written."""
    parts = write(mark)
    if len(parts) != 1 or not isinstance(parts[0], Literal):
        return Sequence((TextWithout(pattern, mark.strip()), *parts))
    return (
        TextUntil(mark) if pattern == _ANY_TEXT and mark == mark.strip() else TextWithout(pattern, mark.strip(), mark)
    )


def _properties(schema: Schema, path: str = "") -> tuple[dict[str, Any], set[str]]:
    """Returns the properties of an object's schema and which are required. Raises GrammarError for other keywords."""
    for keyword in schema:
        if keyword not in _OF_OBJECTS:
            raise GrammarError(f"the schema's {path}/{keyword} is not supported by this model's format of calls")
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError(f"the schema's {path}/required must be a list of names")
    properties = dict(named) if isinstance(named, Mapping) else {}
    for name in required:
        properties.setdefault(name, schema.get("additionalProperties", {}))
    return properties, set(required)


Argument = Callable[[str], Part]
"""Returns a grammar of an argument behind this text, which is part of its first literal: a lexer takes the longest
literal that it can begin, and that may be another one."""


def _in_order(arguments: Several[tuple[Argument, bool]], separator: str) -> Part:
    """Returns a grammar of the arguments in their order, those that are required and any of the others."""
    after: Part = Sequence(())
    first: Part = Sequence(())
    for argument, is_required in reversed(arguments):
        then, more = after, argument(separator)
        leading = Sequence((argument(""), then))
        first = Rule(leading if is_required else OneOf((leading, first)))
        after = Rule(Sequence((more if is_required else Repeat(more, 0, 1), then)))
    return first


def _listed(item: Part, separator: Several[Part], at_least: int = 0, at_most: int | None = None) -> Part:
    """Returns a grammar of so many items with the separator between them."""
    if at_most == 0:
        return Sequence(())
    more = Repeat(Sequence((*separator, item)), max(at_least - 1, 0), None if at_most is None else at_most - 1)
    items = Sequence((item, more))
    return items if at_least else Repeat(items, 0, 1)


def string_pattern(schema: Schema, path: str) -> str:
    """Returns a regular expression of the strings that satisfy the schema, written as they are."""
    for keyword in schema:
        if keyword not in _OF_STRINGS:
            raise GrammarError(f"the schema's {path}/{keyword} is not supported by this model's format of calls")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list | None):
        raise GrammarError(f"the schema's {path}/enum must be a list")
    if values is not None:
        return "|".join(escaped(value) for value in values if isinstance(value, str))
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        raise GrammarError(f"the schema's {path}/pattern cannot stand beside a length in this model's format of calls")
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise GrammarError(f"the schema's {path}/pattern must be a text")
        return _whole_pattern(schema["pattern"])
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return _ANY_TEXT if (least, most) == (0, "") else f"(?s:.{{{int(least)},{most}}})"


def _whole_pattern(pattern: str) -> str:
    """Returns a pattern for a whole text that finds `pattern` somewhere in it."""
    before = "" if pattern.startswith("^") else _ANY_TEXT
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else _ANY_TEXT
    return f"{before}(?:{pattern.removeprefix('^')[: -1 if after == '' else None]}){after}"


def _check_free(schema: Schema, path: str) -> None:
    """Raises GrammarError if a schema of values of all types restricts them: they are written as any text."""
    for keyword in schema.keys() - {"type"} - _ANNOTATIONS:
        raise GrammarError(f"the schema's {path}/{keyword} needs a type in this model's format of calls")


class _Tagged:
    """Arguments between marks."""

    def __init__(self, marks: TaggedArguments, root: Schema, write: Write) -> None:
        self._marks, self._root, self._write = marks, root, write

    def arguments(self, schema: Schema | None) -> Part:
        if schema is None:
            return self._any()
        properties, required = _properties(schema)
        written = [(self._argument(name, part), name in required) for name, part in properties.items()]
        return _in_order(written, self._marks.between)

    def _any(self) -> Part:
        marks = self._marks
        kinds = tuple(Sequence(self._write(each)) for each in (marks.after_key, marks.after_key_of_other) if each)
        first, more = (
            Sequence((*self._write(lead + marks.before_key), _KEY, OneOf(kinds), self._text()))
            for lead in ("", marks.between)
        )
        return Repeat(Sequence((first, Repeat(more))), 0, 1)

    def _argument(self, name: str, schema: Any) -> Argument:
        schema = resolved(schema, self._root)
        if not all(character.isalnum() or character in "_-.$" for character in name):
            raise GrammarError(f"the schema's /properties/{name} has a name that this model's format cannot write")
        branches = _branches(schema, self._root)
        return lambda lead: OneOf(tuple(self._one(lead, name, each) for each in branches))

    def _one(self, lead: str, name: str, schema: Schema) -> Part:
        marks, is_string = self._marks, types_of(schema, self._root) == STRING
        after_key = marks.after_key if is_string or marks.after_key_of_other is None else marks.after_key_of_other
        before = self._write(f"{lead}{marks.before_key}{name}{after_key}")
        if is_string:
            return Sequence((*before, self._text(string_pattern(schema, f"/properties/{name}"))))
        if types_of(schema, self._root) == ANY:
            _check_free(schema, f"/properties/{name}")
            return Sequence((*before, self._text()))
        return Sequence((*before, self._other(schema), *self._write(marks.after_value)))

    def _text(self, pattern: str = _ANY_TEXT) -> Part:
        return text_up_to(self._marks.after_value, self._write, pattern)

    def _other(self, schema: Schema) -> Part:
        types = types_of(schema, self._root)
        if self._marks.has_python_constants and types <= {"boolean", "null"} and "enum" not in schema:
            return _constants(types)
        return JsonSchema(_with_definitions(schema, self._root))


class _Literals:
    """Arguments that are literals."""

    def __init__(self, notation: LiteralArguments, root: Schema, write: Write) -> None:
        self._notation, self._root, self._write = notation, root, write

    def arguments(self, schema: Schema | None) -> Part:
        notation = self._notation
        return self._members(schema, notation.opening, notation.assign, notation.closing, "")

    def _members(self, schema: Schema | None, opening: str, assign: str, closing: str, path: str) -> Part:
        separator = self._write(", " if self._notation.has_escapes else ",")
        if schema is None:
            member = Sequence((_KEY, *self._write(assign), self._any()))
            inner = _listed(member, separator)
        else:
            properties, required = _properties(schema, path)
            written = [
                (self._member(name + assign, each, f"{path}/properties/{name}"), name in required)
                for name, each in properties.items()
            ]
            inner = _in_order(written, ", " if self._notation.has_escapes else ",")
        return Sequence((*self._write(opening), inner, *self._write(closing)))

    def _member(self, beginning: str, schema: Any, path: str) -> Argument:
        value = Rule(self._value(schema, path))
        return lambda lead: Sequence((*self._write(lead + beginning), value))

    def _any(self) -> Part:
        if self._notation.has_escapes:
            return OneOf((JsonSchema({}), _SINGLE_QUOTED))
        return OneOf((self._string(_ANY_TEXT), JsonSchema({"type": ["number", "boolean", "null"]})))

    def _value(self, schema: Any, path: str) -> Part:
        schema = resolved(schema, self._root)
        return OneOf(tuple(self._one(each, path) for each in _branches(schema, self._root)))

    def _one(self, schema: Schema, path: str) -> Part:
        types = types_of(schema, self._root)
        if types == ANY:
            _check_free(schema, path)
            return self._any()
        if self._notation.has_escapes:
            is_constant = types <= {"boolean", "null"} and "enum" not in schema
            return _constants(types) if is_constant else JsonSchema(_with_definitions(schema, self._root))
        if types == STRING:
            return self._string(string_pattern(schema, path))
        if types == {"array"}:
            return self._array(schema, path)
        if types == {"object"}:
            return self._members(schema, "{", ":", "}", path)
        return JsonSchema(_with_definitions(schema, self._root))

    def _array(self, schema: Schema, path: str) -> Part:
        for keyword in schema.keys() - {"type", "items", "minItems", "maxItems"} - _ANNOTATIONS:
            raise GrammarError(f"the schema's {path}/{keyword} is not supported by this model's format of calls")
        item = Rule(self._value(schema.get("items", {}), f"{path}/items"))
        items = _listed(item, (Literal(","),), schema.get("minItems", 0), schema.get("maxItems"))
        return Sequence((Literal("["), items, Literal("]")))

    def _string(self, pattern: str) -> Part:
        quote = self._notation.quote
        return Sequence((*self._write(quote), text_up_to(quote, self._write, pattern)))


def _branches(schema: Any, root: Schema) -> list[Schema]:
    """Returns schemas of which each is of one kind of value, one of which must be satisfied. Raises GrammarError for
    more than a call is told apart by: references could make them billions."""
    branches = list(islice(_each_branch(schema, root), _MAX_BRANCHES + 1))
    if len(branches) > _MAX_BRANCHES:
        raise GrammarError(f"the schema has a value of more than {_MAX_BRANCHES} alternatives")
    return branches


def _each_branch(schema: Any, root: Schema) -> Iterator[Schema]:
    if not isinstance(schema, Mapping):
        yield {}
        return
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and not schema.keys() - {keyword} - _ANNOTATIONS:
            yield from chain.from_iterable(_each_branch(resolved(option, root), root) for option in options)
            return
    if isinstance(names := schema.get("type"), list) and "enum" not in schema:
        yield from ({**schema, "type": name} for name in names)
    elif isinstance(values := schema.get("enum"), list):
        strings = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        yield from [{**schema, "type": "string", "enum": strings}] * bool(strings) + [{"enum": others}] * bool(others)
    else:
        yield schema


def _constants(types: frozenset[str]) -> Part:
    names = ["True", "False"] * ("boolean" in types) + ["None"] * ("null" in types)
    return Regex("|".join(names))


def _with_definitions(schema: Schema, root: Schema) -> Schema:
    shared = {keyword: root[keyword] for keyword in ("$defs", "definitions") if keyword in root}
    if "#/properties" in json.dumps(schema):
        raise GrammarError("a $ref in the schema is not supported by this model's format of calls")
    return {**shared, **schema}
