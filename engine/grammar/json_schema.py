"""The part of JSON Schema that can be enforced token by token. Other keywords are refused, with their place.

The dialect is Draft 2020-12, as far as llguidance compiles it (docs/json_schema.md of guidance-ai/llguidance).
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from engine.core.errors import GrammarError
from engine.grammar.schema_keywords import (
    BOUNDS,
    COUNTS,
    FORMATS,
    OTHER_BOUNDS,
    UNENFORCED_FORMATS,
    UNSUPPORTED,
    is_end,
    is_neutral,
)
from engine.grammar.schema_tree import everywhere, target

MAX_DEPTH = 100  # of the schema's own JSON
_MAX_DIVISOR = 2**32 - 1  # as an integer, without its decimal point
_LARGEST_BOUND = 10**100  # regular expressions nest a level for each digit


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises GrammarError, with a JSON pointer to the place, if part of the schema cannot be enforced."""
    _check_depth(schema)
    for path, part in _subschemas(schema):
        for keyword in part:
            if keyword in UNSUPPORTED and not is_neutral(keyword, part):
                raise GrammarError(f"the schema's {path}/{keyword} is not supported")
        _check_lists(path, part)
        _check_format(path, part)
        _check_reference(path, part)
        _check_min_properties(path, part)
        _check_exclusive_bounds(path, part)
        _check_numbers(path, part)
        _check_divisor(path, part)


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
    """Yields every schema object that is compiled, the schema itself included, with the JSON pointer to it. What no
    reference leads to is none."""
    seen, places = set[str](), [("", schema)]
    while places:
        start, root = places.pop()
        for step, part in everywhere(root):
            path = start + step
            yield path, part
            reference = part.get("$ref")
            if reference is not None and reference not in seen:
                seen.add(reference)
                places.append((reference[1:100], _target(schema, path, reference)))


def _target(schema: Any, path: str, reference: str) -> Any:
    try:
        return target(schema, reference)
    except (LookupError, TypeError, ValueError) as error:
        raise GrammarError(f"the schema's {path}/$ref leads nowhere") from error


def _check_lists(path: str, part: Mapping[str, Any]) -> None:
    names = part.get("required", [])
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise GrammarError(f"the schema's {path}/required must be a list of names")
    for keyword in ("enum", "prefixItems"):
        if not isinstance(part.get(keyword, []), list | tuple):
            raise GrammarError(f"the schema's {path}/{keyword} must be a list")


def _check_format(path: str, part: Mapping[str, Any]) -> None:
    name = part.get("format")
    if name is not None and (not isinstance(name, str) or name in UNENFORCED_FORMATS):
        raise GrammarError(f"the schema's {path}/format is {name!r:.100}; supported are {', '.join(sorted(FORMATS))}")


def _check_reference(path: str, part: Mapping[str, Any]) -> None:
    reference = part.get("$ref", "#")
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
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
    for excluding, others in OTHER_BOUNDS.items():
        bound = part.get(excluding)
        if isinstance(bound, int) or (isinstance(bound, float) and bound.is_integer()):
            for other in others:
                limit = part.get(other)
                if isinstance(limit, int | float) and bound - 1 < limit < bound + 1:
                    raise GrammarError(f"the schema's {path}/{excluding} is not supported so close to {other}")


def _check_numbers(path: str, part: Mapping[str, Any]) -> None:
    for keyword in (*BOUNDS, *COUNTS):
        value = part.get(keyword, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GrammarError(f"the schema's {path}/{keyword} must be a number")
    for keyword in (*BOUNDS, *COUNTS, "const", "enum"):
        if not all(map(math.isfinite, _floats(part.get(keyword)))):
            raise GrammarError(f"the schema's {path}/{keyword} has a number that JSON has not")
    for keyword in BOUNDS:
        if abs(part.get(keyword, 0)) >= _LARGEST_BOUND and not is_end(keyword, part[keyword]):
            raise GrammarError(f"the schema's {path}/{keyword} has more than 100 digits")
    for keyword in COUNTS:
        if part.get(keyword, 0) < 0 or part.get(keyword, 0) % 1:
            raise GrammarError(f"the schema's {path}/{keyword} must be a whole number, 0 or more")


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for child in _children(value):
        yield from _floats(child)


def _check_divisor(path: str, part: Mapping[str, Any]) -> None:
    """Raises GrammarError for a multipleOf that the compiler would read as another number, or not at all."""
    divisor = part.get("multipleOf", 1)
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor <= _MAX_DIVISOR:
        raise GrammarError(f"the schema's {path}/multipleOf must be a number above 0, up to {_MAX_DIVISOR}")
    scaled, places = float(divisor), 0
    while scaled % 1:
        scaled, places = scaled * 10, places + 1
    if scaled > _MAX_DIVISOR or Decimal(scaled) != Decimal(repr(divisor)).scaleb(places) or places > 9:
        raise GrammarError(f"the schema's {path}/multipleOf has too many digits to be enforced")
