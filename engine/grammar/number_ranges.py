"""Numbers that the compiler of schemas, which reads doubles, would change, and regular expressions of exact ranges."""

import math
from collections.abc import Callable
from typing import Any

EXACT_INTEGERS = 2**53  # every integer up to this is a double
_EXACT_DIGITS = 15  # of a fraction: the compiler parses longer ones to a neighbouring double
_LEAST_FRACTION = 1e-20  # smaller ones are written with as many zeros


def is_exact(number: float) -> bool:
    """Whether the compiler of schemas reads and writes this number as it is."""
    if isinstance(number, int):
        return abs(number) <= EXACT_INTEGERS
    if number.is_integer():
        return abs(number) <= EXACT_INTEGERS and math.copysign(1, number) == (-1 if number < 0 else 1)
    digits = repr(number).split("e")[0].replace(".", "").replace("-", "").strip("0")
    return len(digits) <= _EXACT_DIGITS and abs(number) >= _LEAST_FRACTION


def has_inexact_number(value: Any) -> bool:
    """Whether a constant has a number somewhere that the compiler of schemas would change."""
    if isinstance(value, dict):
        return any(map(has_inexact_number, value.values()))
    if isinstance(value, list):
        return any(map(has_inexact_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and not is_exact(value)


def integers(low: int | None, high: int | None) -> str:
    """Returns a regular expression of the integers from `low` to `high`, both included; None for no bound."""
    return _signed(low, high, _naturals, 1)


def numbers(low: int | None, high: int | None) -> str:
    """Returns a regular expression of the numbers from `low` to `high`, with any fraction and no exponent."""
    return _signed(low, high, _magnitudes, 0)


def _signed(low: int | None, high: int | None, magnitudes: Callable[[int, int | None], str], least: int) -> str:
    """Returns a regular expression of both signs; `least` is the smallest magnitude that may be negative."""
    parts = []
    if high is None or high >= 0:
        parts.append(magnitudes(max(low or 0, 0), high))
    if low is None or low < 0:
        nearest = least if high is None or high >= 0 else -high
        parts.append(f"-{magnitudes(nearest, None if low is None else -low)}")
    return _either(parts)


def _magnitudes(low: int, high: int | None) -> str:
    if high is None:
        return _naturals(low, None) + r"(?:\.[0-9]+)?"
    last = rf"{high}(?:\.0+)?"
    return last if low == high else _either([_naturals(low, high - 1) + r"(?:\.[0-9]+)?", last])


def _naturals(low: int, high: int | None) -> str:
    first, last = str(low), "9" * len(str(low)) if high is None else str(high)
    if len(first) == len(last):
        parts = [_same_length(first, last)]
    else:
        parts = [_at_least(first), _at_most(last, least_first=1)]
        if len(last) - len(first) > 1:
            parts.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
    if high is None:
        parts.append(f"[1-9][0-9]{{{len(first)},}}")
    return _either(parts)


def _same_length(low: str, high: str) -> str:
    if low[:1] == high[:1]:
        return low[:1] + _same_length(low[1:], high[1:]) if low else ""
    between = _digits(int(low[0]) + 1, int(high[0]) - 1, len(low) - 1)
    return _either([low[0] + _at_least(low[1:]), *between, high[0] + _at_most(high[1:])])


def _at_least(low: str) -> str:
    if not low.strip("0"):
        return f"[0-9]{{{len(low)}}}" if low else ""
    return _either([low[0] + _at_least(low[1:]), *_digits(int(low[0]) + 1, 9, len(low) - 1)])


def _at_most(high: str, least_first: int = 0) -> str:
    if not high:
        return ""
    return _either([*_digits(least_first, int(high[0]) - 1, len(high) - 1), high[0] + _at_most(high[1:])])


def _digits(least: int, greatest: int, others: int) -> list[str]:
    """Returns the expression of a digit of a range and any others behind it, or nothing if the range is empty."""
    if least > greatest:
        return []
    return [f"[{least}-{greatest}]" + (f"[0-9]{{{others}}}" if others else "")]


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
