"""Expressions of numbers that the compiler of schemas would change: a number's range, and constants."""

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from engine.core.errors import GrammarError
from engine.grammar.number_ranges import decimals, integers, is_exact, numbers
from engine.grammar.schema_keywords import BOUNDS, TYPES, types_of

COMMA, COLON = "/, ?/", "/: ?/"
"""At most one space, and only where Python's json.dumps puts one: no model can generate whitespace for ever."""

_MAX_FRACTION_DIGITS = 40
_SURROGATES = range(0xD800, 0xE000)


def quoted(text: str) -> str:
    """Returns the expression of a text without control characters."""
    if any(ord(character) in _SURROGATES for character in text):
        raise GrammarError("a text in it has lone surrogates")
    return json.dumps(text, ensure_ascii=False)


def constant(value: Any) -> str:
    """Returns the expression of a constant, with its numbers as they are."""
    if isinstance(value, dict):
        members = (
            f"{quoted(json.dumps(name, ensure_ascii=False))} {COLON} {constant(each)}" for name, each in value.items()
        )
        return " ".join(('"{"', f" {COMMA} ".join(members), '"}"'))
    if isinstance(value, list):
        return " ".join(('"["', f" {COMMA} ".join(map(constant, value)), '"]"'))
    return quoted(json.dumps(value, ensure_ascii=False))


def satisfies(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a constant has a type of the schema, and is within its bounds."""
    if not types_of_value(value) & types_of(schema):
        return False
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
    is_above = "exclusiveMinimum" not in schema or value > above
    return bool(low <= value <= high and is_above and ("exclusiveMaximum" not in schema or value < below))


def types_of_value(value: Any) -> frozenset[str]:
    """Returns the types of JSON Schema that a constant has: an integer is a number, too."""
    for kind, name in ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object"), (type(None), "null")):
        if isinstance(value, kind):
            return frozenset({name})
    return frozenset({"integer", "number"} if value % 1 == 0 else {"number"}) & TYPES


def number_range(path: str, schema: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns schemas and expressions that together are the numbers of a schema with bounds of many digits. The schemas
    have no such bounds: those are the numbers near another bound that is a fraction or exclusive."""
    if "multipleOf" in schema:
        raise GrammarError(f"the schema's {path}/multipleOf cannot stand beside a bound of so many digits")
    bounds = {keyword: schema[keyword] for keyword in BOUNDS if keyword in schema}
    if types_of(schema) & {"integer", "number"} == {"integer"}:
        return [], [_range(path, integers, _least_integer(bounds, 1), _least_integer(bounds, -1))]
    if not all(is_exact(value) or float(value).is_integer() for value in bounds.values()):
        return [], [_decimal_range(path, bounds)]
    for keyword, value in bounds.items():
        bounds[keyword] = (
            value if is_exact(value) else _double(value, math.inf if keyword.lower().endswith("minimum") else -math.inf)
        )
    low, high = _side(bounds, 1), _side(bounds, -1)
    if all(map(is_exact, (low | high).values())):
        return [{"type": "number", **low, **high}], []
    ends, inner = list[dict[str, Any]](), list[int | None]()
    for sign, side in ((1, low), (-1, high)):
        inner.append(_least_integer(side, sign))
        if side and (inner[-1] not in side.values() or not side.keys() & {"minimum", "maximum"}):
            ends.append({"type": "number", **side, ("maximum" if sign > 0 else "minimum"): inner[-1]})
    return ends, [_range(path, numbers, *inner)]


def _range(path: str, written: Callable[[int | None, int | None], str], low: int | None, high: int | None) -> str:
    if low is not None and high is not None and low > high:
        raise GrammarError(f"the schema's {path}/minimum is greater than its maximum")
    return f"/{written(low, high)}/"


def _decimal_range(path: str, bounds: Mapping[str, Any]) -> str:
    """Returns the numbers whose digits are within the bounds, which may be fractions of any digits. A parser rounds
    them to doubles that are so, too, since a bound is what its own digits are rounded to."""
    for keyword, bound in bounds.items():
        if -int(Decimal(repr(bound)).as_tuple().exponent) > _MAX_FRACTION_DIGITS:
            raise GrammarError(f"the schema's {path}/{keyword} is nearer to zero than can be enforced")
    ends = list[Decimal | None]()
    for sign in (1, -1):
        inclusive, exclusive = _names(sign)
        candidates = [sign * Decimal(repr(bounds[inclusive]))] if inclusive in bounds else []
        if exclusive in bounds:
            candidates.append(sign * Decimal(repr(math.nextafter(bounds[exclusive], sign * math.inf))))
        ends.append(max(candidates) * sign if candidates else None)
    low, high = ends
    if low is not None and high is not None and low > high:
        raise GrammarError(f"the schema's {path}/minimum is greater than its maximum")
    return f"/{decimals(low, high)}/"


def _double(bound: float, inwards: float) -> int:
    """Returns the first double from the bound on."""
    nearest = float(bound)
    is_within = nearest >= bound if inwards > 0 else nearest <= bound
    return int(nearest if is_within else math.nextafter(nearest, inwards))


def _names(sign: int) -> tuple[str, str]:
    return ("minimum", "exclusiveMinimum") if sign > 0 else ("maximum", "exclusiveMaximum")


def _least_integer(bounds: Mapping[str, Any], sign: int) -> int | None:
    """Returns the bound of integers: the least one, or with the sign -1 the greatest."""
    inclusive, exclusive = _names(sign)
    candidates = [sign * math.ceil(sign * bounds[inclusive])] if inclusive in bounds else []
    if exclusive in bounds:
        candidates.append(sign * (math.floor(sign * bounds[exclusive]) + 1))
    return max(candidates, key=lambda bound: sign * bound, default=None)


def _side(bounds: Mapping[str, Any], sign: int) -> dict[str, Any]:
    """Returns the stricter of the bounds of one side."""
    inclusive, exclusive = _names(sign)
    if inclusive in bounds and exclusive in bounds:
        is_stricter = sign * bounds[exclusive] >= sign * bounds[inclusive]
        return {exclusive: bounds[exclusive]} if is_stricter else {inclusive: bounds[inclusive]}
    return {keyword: bounds[keyword] for keyword in (inclusive, exclusive) if keyword in bounds}
