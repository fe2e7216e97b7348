"""What tells versions of the engine's own code apart."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import engine

__all__ = ["digests_of_packages", "digests_of_python", "library_settings"]

_LIBRARIES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")
"""Beginnings of the environment variables by which libraries are told how to compute."""


def digests_of_packages(names: Iterable[str]) -> list[list[tuple[str, str]]]:
    """Returns the digests of these packages of the engine."""
    return [digests_of_python(Path(engine.__file__).parent / name) for name in names]


def digests_of_python(root: Path) -> list[tuple[str, str]]:
    """Returns the Python files below a directory, by their names there, and hashes of their contents."""
    paths = sorted(root.rglob("*.py"))
    return [(str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]


def library_settings() -> list[tuple[str, str]]:
    """Returns the environment variables by which libraries are told how to compute."""
    return sorted(item for item in os.environ.items() if item[0].startswith(_LIBRARIES))
