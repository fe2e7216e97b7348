"""Parsers of numeric flags: each takes the text of a value and raises argparse.ArgumentTypeError if it is invalid."""

import argparse
import math
from collections.abc import Callable

__all__ = ["count", "number", "positive", "positive_number"]


def _whole_number(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text) if text.isdecimal() else minimum - 1
        except ValueError:  # thousands of digits
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} up")
        return value

    return parse


count, positive = _whole_number(0), _whole_number(1)


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def positive_number(text: str) -> float:
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value
