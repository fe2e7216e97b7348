"""The exit of each program of this package: its code, also after Ctrl-C."""

import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["exit_with"]

_INTERRUPTED = 130  # the exit code that shells give a program which Ctrl-C ended


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Exits with the code of `main`, and without a traceback after Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
