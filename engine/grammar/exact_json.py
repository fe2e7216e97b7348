"""Grammars of schemas with numbers that the compiler of schemas would change: it reads and writes doubles.

The schemas around such a number are written as rules, with the number as it is. All others are left to the compiler,
with its `%json`. What cannot be written as a rule is refused with its place.
"""

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any

from engine.core.errors import GrammarError
from engine.grammar.disjoint_schemas import are_disjoint
from engine.grammar.exact_numbers import COLON, COMMA, constant, number_range, quoted, satisfies
from engine.grammar.number_ranges import has_inexact_number, is_exact
from engine.grammar.schema_keywords import BOUNDS, moved_inwards, types_of
from engine.grammar.schema_tree import IN_PLACE, FlatSchema, Schema, escaped_name, everywhere, rebuilt

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NAME = r'"[^"\\\x00-\x1f\x7f]*"'  # without escapes, which could spell the name of a property
_MANY_DIGITS = "with numbers of so many digits"

_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
)
_OF_NUMBERS = frozenset({*BOUNDS, "multipleOf"})
_OF_TYPES = {"array": _OF_ARRAYS, "object": _OF_OBJECTS, "number": _OF_NUMBERS}
_OTHERS = frozenset({"minLength", "maxLength", "pattern", *IN_PLACE, "enum", "const"})
_KEYWORDS = frozenset().union(*_OF_TYPES.values(), _OTHERS)


def json_rules(flat: FlatSchema, prefix: str) -> tuple[str, list[str]]:
    """Returns an expression of a schema's JSON and the rules that it refers to, whose names begin with the prefix.
    Raises GrammarError for a number that cannot be enforced where it stands."""
    rules = _JsonRules(flat, prefix)
    return rules.expression("", flat.root), rules.lines


class _JsonRules:
    def __init__(self, flat: FlatSchema, prefix: str) -> None:
        self._definitions = flat.definitions
        self._dialect = {"$schema": flat.root["$schema"]} if "$schema" in flat.root else {}
        self._prefix = prefix
        self._inexact = _inexact_definitions(flat)
        self._shared = dict[str, str]()
        self._num_rules = 0
        self.lines: list[str] = []

    def expression(self, path: str, schema: Schema) -> str:
        """Returns an expression of what satisfies the schema at this place."""
        if not _is_inexact(schema, self._inexact):
            return self._compiled(schema)
        if "enum" in schema or "const" in schema:
            return self._constants(path, schema)
        if in_place := [keyword for keyword in IN_PLACE if keyword in schema]:
            return self._in_place(path, schema, in_place[0])
        parts, types = list[str](), types_of(schema)
        if types & {"integer", "number"} and not all(is_exact(schema.get(keyword, 0)) for keyword in BOUNDS):
            ends, ranges = number_range(path, schema)
            parts += [*map(self._compiled, ends), *ranges]
            types -= {"integer", "number"}
        for name, written in (("object", self._object), ("array", self._array)):
            described = {keyword: schema[keyword] for keyword in _OF_TYPES[name] if keyword in schema}
            if name in types and _is_inexact(described, self._inexact):
                parts.append(written(path, described))
                types -= {name}
        if types:
            parts.append(self._compiled(_of_types(schema, types)))
        return _either(parts)

    def _constants(self, path: str, schema: Mapping[str, Any]) -> str:
        keyword = "enum" if "enum" in schema else "const"
        self._alone(path, schema, keyword, {"enum", "const", *BOUNDS})
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        values = [value for value in values if satisfies(value, schema) and schema.get("const", value) == value]
        if not values:
            raise GrammarError(f"the schema's {path}/{keyword} has no value that satisfies the schema")
        exact = [value for value in values if not has_inexact_number(value)]
        parts = [constant(value) for value in values if has_inexact_number(value)]
        return _either([*([self._compiled({"enum": exact})] if exact else []), *parts])

    def _in_place(self, path: str, schema: Mapping[str, Any], keyword: str) -> str:
        self._alone(path, schema, keyword, {keyword})
        if keyword == "$ref":
            return self._reference(schema["$ref"])
        options = schema[keyword]
        if keyword == "allOf" and len(options) != 1:
            raise GrammarError(f"the schema's {path}/allOf is not supported {_MANY_DIGITS}")
        if keyword == "oneOf" and not are_disjoint(options, self._definitions):
            raise GrammarError(f"the schema's {path}/oneOf may have members that overlap, {_MANY_DIGITS}")
        if "type" in schema:
            options = [self._typed(f"{path}/{keyword}", option, schema["type"]) for option in options]
        return _either([self.expression(f"{path}/{keyword}/{index}", each) for index, each in enumerate(options)])

    def _typed(self, path: str, option: Schema, types: Any) -> Schema:
        if not isinstance(option, Mapping) or any(keyword in option for keyword in IN_PLACE):
            raise GrammarError(f"the schema's {path} cannot stand beside a type {_MANY_DIGITS}")
        both = types_of(option) & types_of({"type": types})
        return {**option, "type": sorted(both)}

    def _reference(self, reference: str) -> str:
        if reference not in self._shared:
            name = self._shared[reference] = self._new_name()
            body = self.expression(reference[1:100], self._definitions[reference])
            self.lines.append(f"{name}: {body}")
        return self._shared[reference]

    def _object(self, path: str, schema: Mapping[str, Any]) -> str:
        rest = schema.get("additionalProperties", True)
        named, required = schema.get("properties"), schema.get("required", ())
        properties = dict(named) if isinstance(named, Mapping) else {}
        for name in required:  # in its order, which is the grammar's
            properties.setdefault(name, rest)
        if schema.get("patternProperties") or schema.get("minProperties", 0) > len(set(required)):
            keyword = "patternProperties" if schema.get("patternProperties") else "minProperties"
            raise GrammarError(f"the schema's {path}/{keyword} is not supported {_MANY_DIGITS}")
        if schema.get("maxProperties", len(properties)) < len(properties) or ("maxProperties" in schema and rest):
            raise GrammarError(f"the schema's {path}/maxProperties is not supported {_MANY_DIGITS}")
        members = [
            (self._member(f"{path}/properties/{escaped_name(name)}", name, part), name in required)
            for name, part in properties.items()
            if part is not False or name in required
        ]
        last = self._additional(path, properties, rest) if rest is not False else None
        return f'"{{" {self._in_order(members, last)} "}}"'

    def _member(self, path: str, name: str, schema: Schema) -> str:
        return self._rule(f"{quoted(json.dumps(name, ensure_ascii=False))} {COLON} {self.expression(path, schema)}")

    def _additional(self, path: str, taken: Iterable[str], schema: Schema) -> str:
        """Returns the name of a rule for a property with any other name than those taken."""
        names = " & ".join(f"~{quoted(json.dumps(name, ensure_ascii=False))}" for name in taken)
        terminal = f"{self._prefix.upper()}_NAME_{self._new_name().rpartition('_')[2]}"
        self.lines.append(f"{terminal}: /{_NAME}/{f' & {names}' if names else ''}")
        return self._rule(f"{terminal} {COLON} {self.expression(f'{path}/additionalProperties', schema)}")

    def _in_order(self, members: list[tuple[str, bool]], last: str | None) -> str:
        """Returns an expression of the members in their order, those that are required and any of the others, and of
        any number of the last one."""
        after = self._rule(f"({COMMA} {last})*") if last else ""
        first = self._rule(f"({last} {after})?") if last else ""
        for member, is_required in reversed(members):
            begins = f"{member} {after}"
            first = self._rule(begins if is_required else _either([begins, first or '""']))
            more = f"{COMMA} {begins}"
            after = self._rule(more if is_required else _either([more, after or '""']))
        return first or '""'

    def _array(self, path: str, schema: Mapping[str, Any]) -> str:
        items, before = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(items, list):
            items, before = True, items
        least, most = schema.get("minItems", 0), schema.get("maxItems", None)
        if items is False:
            most = len(before) if most is None else min(most, len(before))
        if most is not None and most < least:
            raise GrammarError(f"the schema's {path}/minItems is greater than the number of items that there may be")
        before = [self.expression(f"{path}/prefixItems/{index}", part) for index, part in enumerate(before[:most])]
        most_behind = None if most is None else most - len(before)
        value = self._rule(self.expression(f"{path}/items", items)) if most_behind != 0 else '""'
        if not before:
            body = f"{value} {self._repeated(value, least - 1, most_behind and most_behind - 1)}"
        else:
            behind = self._repeated(value, least - len(before), most_behind)
            for index in range(len(before) - 1, 0, -1):
                entry = self._rule(f"{COMMA} {before[index]} {behind}")
                behind = entry if index < least else f"{entry}?"
            body = f"{before[0]} {behind}"
        return f'"[" {body if least else f"({body})?"} "]"'

    def _repeated(self, value: str, at_least: int, at_most: int | None) -> str:
        if at_most == 0:
            return '""'
        more = self._rule(f"{COMMA} {value}")
        return f"{more}{{{max(at_least, 0)},{'' if at_most is None else at_most}}}"

    def _compiled(self, schema: Schema) -> str:
        """Returns an expression that the compiler makes of a schema, all of whose numbers it reads as they are."""
        names, pending, definitions = dict[str, str](), [schema], list[Schema]()

        def renamed(part: Schema) -> Schema:
            if not isinstance(part, Mapping):
                return part
            part = moved_inwards(rebuilt(part, lambda _, inner: renamed(inner)))
            reference = part.get("$ref")
            if reference is None:
                return part
            if reference not in names:
                names[reference] = str(len(names))
                pending.append(self._definitions[reference])
            return {**part, "$ref": f"#/$defs/{names[reference]}"}

        for each in pending:  # grows meanwhile
            definitions.append(renamed(each))
        root = definitions[0] if isinstance(definitions[0], Mapping) else {"allOf": [definitions[0]]}
        root = {keyword: value for keyword, value in root.items() if keyword not in ("$defs", "definitions")}
        shared = {"$defs": dict(zip(names.values(), definitions[1:], strict=True))} if names else {}
        try:
            return "%json " + json.dumps({**self._dialect, **root, **shared, "x-guidance": _LAYOUT}, allow_nan=False)
        except ValueError as error:
            raise GrammarError("the schema has a number that JSON has not") from error

    def _alone(self, path: str, schema: Mapping[str, Any], keyword: str, allowed: Set[str]) -> None:
        for other in schema:
            if other in _KEYWORDS and other not in allowed:
                raise GrammarError(f"the schema's {path}/{other} cannot stand beside {keyword} {_MANY_DIGITS}")

    def _rule(self, body: str) -> str:
        name = self._new_name()
        self.lines.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _has_inexact_number(schema: Mapping[str, Any]) -> bool:
    """Whether a number of the schema itself, not of those within, would be changed by the compiler."""
    constants = [schema[keyword] for keyword in ("const", "enum") if keyword in schema]
    return has_inexact_number(constants) or not all(is_exact(schema.get(keyword, 0)) for keyword in BOUNDS)


def _is_inexact(schema: Schema, definitions: Set[str]) -> bool:
    """Whether a number somewhere in the schema would be changed by the compiler."""
    return any(_has_inexact_number(part) or part.get("$ref") in definitions for _, part in everywhere(schema))


def _inexact_definitions(flat: FlatSchema) -> Set[str]:
    """Returns the references to definitions with a number that the compiler would change, or that refer to such."""
    users: dict[str, list[str]] = {name: [] for name in flat.definitions}
    found = list[str]()
    for name, schema in flat.definitions.items():
        for _, part in everywhere(schema):
            if "$ref" in part:
                users[part["$ref"]].append(name)
        if _is_inexact(schema, frozenset()):
            found.append(name)
    for name in found:  # grows meanwhile
        found += [user for user in users.pop(name, ()) if user in users and user not in found]
    return frozenset(found)


def _of_types(schema: Mapping[str, Any], types: Set[str]) -> dict[str, Any]:
    """Returns the schema for some of its types only."""
    names = types | ({"number"} if "integer" in types else set())
    dropped = frozenset().union(*(keywords for name, keywords in _OF_TYPES.items() if name not in names))
    return {**{keyword: value for keyword, value in schema.items() if keyword not in dropped}, "type": sorted(types)}
