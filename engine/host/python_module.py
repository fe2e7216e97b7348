"""How child processes run a module of this program, whatever lies in the working directory."""

import sys
from pathlib import Path

__all__ = ["module_command"]

_ROOT = Path(__file__).resolve().parents[2]
"""The directory that has the package `engine`."""


def module_command(name: str) -> tuple[str, ...]:
    """Returns the command that runs a module. `python -m` looks into the working directory first, where a user may have
    a folder `engine` of their own: with -P it does not."""
    is_in_root = Path.cwd() == _ROOT  # a checkout may be run without being installed
    return (sys.executable, *(() if is_in_root else ("-P",)), "-m", name)
