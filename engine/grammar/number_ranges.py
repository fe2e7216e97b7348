"""Numbers that the compiler of schemas, which reads doubles, would change, and regular expressions of exact ranges."""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar

N = TypeVar("N", int, Decimal)

EXACT_INTEGERS = 2**53  # every integer up to this is a double
_EXACT_DIGITS = 15  # of a fraction: the compiler parses longer ones to a neighbouring double
_LEAST_FRACTION = 1e-20  # smaller ones are written with as many zeros
_ANY_FRACTION = r"(?:\.[0-9]+)?"


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


def decimals(low: Decimal | None, high: Decimal | None) -> str:
    """Returns a regular expression of the numbers from `low` to `high`, whose digits it compares, without exponent."""
    return _signed(low, high, _decimal_magnitudes, 0)


def _signed(low: N | None, high: N | None, magnitudes: Callable[[N | int, N | None], str], least: int) -> str:
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
        return _naturals(low, None) + _ANY_FRACTION
    last = rf"{high}(?:\.0+)?"
    return last if low == high else _either([_naturals(low, high - 1) + _ANY_FRACTION, last])


def _decimal_magnitudes(low: Decimal | int, high: Decimal | None) -> str:
    whole, digits = _split(low)
    if high is None:
        return _either([_naturals(whole + 1, None) + _ANY_FRACTION, _with_fraction(whole, _at_least_digits(digits))])
    last, last_digits = _split(high)
    if whole == last:
        return _with_fraction(whole, _between_digits(digits, last_digits))
    parts = [_with_fraction(whole, _at_least_digits(digits)), _with_fraction(last, _at_most_digits(last_digits))]
    if whole + 1 < last:
        parts.append(_naturals(whole + 1, last - 1) + _ANY_FRACTION)
    return _either(parts)


def _split(number: Decimal | int) -> tuple[int, str]:
    """Returns the whole part of a magnitude, and the digits of its fraction without zeros at their end."""
    whole, _, digits = f"{number:f}".partition(".") if isinstance(number, Decimal) else (str(number), "", "")
    return int(whole), digits.rstrip("0")


def _with_fraction(whole: int, fractions: list[str]) -> str:
    """Returns an expression of a whole part with digits of a fraction behind it, one option of which may be none."""
    digits = _either([each for each in fractions if each])
    return rf"{whole}(?:\.{digits}){'?' if '' in fractions else ''}"


def _at_least_digits(low: str) -> list[str]:
    """Returns expressions of the digits of all fractions from 0.`low` on: none, an empty one, is 0."""
    if not low:
        return ["", "[0-9]+"]
    return [*_digits(int(low[0]) + 1, 9, "*"), low[0] + _optional(_at_least_digits(low[1:]))]


def _at_most_digits(high: str) -> list[str]:
    if not high:
        return ["", "0+"]
    return ["", *_digits(0, int(high[0]) - 1, "*"), high[0] + _optional(_at_most_digits(high[1:]))]


def _between_digits(low: str, high: str) -> list[str]:
    if not low or not high:
        return _at_most_digits(high)
    if low[0] == high[0]:
        return [low[0] + _optional(_between_digits(low[1:], high[1:]))]
    between = _digits(int(low[0]) + 1, int(high[0]) - 1, "*")
    lowest, highest = _optional(_at_least_digits(low[1:])), _optional(_at_most_digits(high[1:]))
    return [low[0] + lowest, *between, high[0] + highest]


def _optional(options: list[str]) -> str:
    """Returns an expression of one of the options, which may be nothing."""
    some = [each for each in options if each]
    return f"(?:{'|'.join(some)})?" if "" in options else _either(some)


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
    between = _digits(int(low[0]) + 1, int(high[0]) - 1, _times(len(low) - 1))
    return _either([low[0] + _at_least(low[1:]), *between, high[0] + _at_most(high[1:])])


def _at_least(low: str) -> str:
    if not low.strip("0"):
        return f"[0-9]{{{len(low)}}}" if low else ""
    return _either([low[0] + _at_least(low[1:]), *_digits(int(low[0]) + 1, 9, _times(len(low) - 1))])


def _at_most(high: str, least_first: int = 0) -> str:
    if not high:
        return ""
    others = _times(len(high) - 1)
    return _either([*_digits(least_first, int(high[0]) - 1, others), high[0] + _at_most(high[1:])])


def _digits(least: int, greatest: int, others: str) -> list[str]:
    """Returns the expression of a digit of a range and so many others behind it, or nothing if the range is empty."""
    if least > greatest:
        return []
    return [f"[{least}-{greatest}]" + (f"[0-9]{others}" if others else "")]


def _times(count: int) -> str:
    return f"{{{count}}}" if count else ""


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
