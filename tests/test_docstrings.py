"""Docstrings can be understood, and found by searching, without the line above them: they begin with their subject."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "server", "twostep", "loadtest", "tools", "benchmarks")
SUBJECT_ELSEWHERE = ("Of ", "As ", "Those ", "That ", "The same ", "Likewise")
"""Beginnings that ask for the name of a field, a function or a line above."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring in a file, those of fields and constants, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_their_subject(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if text.startswith(SUBJECT_ELSEWHERE)
    ]
    assert found == []
