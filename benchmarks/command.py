"""What all programs of this package have in common as commands."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

__all__ = ["exit_with", "positive", "positive_number"]

Number = TypeVar("Number", int, float)

_INTERRUPTED = 130  # the exit code that shells give a program which Ctrl-C ended


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Exits with the code of `main`, and without a traceback after Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def positive(text: str) -> int:
    """An argument's value: an integer above 0."""
    return _above_zero(text, int)


def positive_number(text: str) -> float:
    """An argument's value above 0."""
    return _above_zero(text, float)


def _above_zero(text: str, read: Callable[[str], Number]) -> Number:
    try:
        value = read(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value
