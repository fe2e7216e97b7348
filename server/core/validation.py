"""Findings of pydantic -> one sentence about the first of them, which names the parameter."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from server.core.errors import BadRequestError

_TOLD_EXACTLY = frozenset({"messages", "tools", "tool_choice", "input", "system", "text"})
"""Parameters so deep that the place in them is named, too."""


def problem_of(errors: Sequence[ErrorDetails | Any], depth: int = 0) -> BadRequestError:
    """`depth` is how many parts of each place come before the parameter."""
    problem = errors[0]
    path = [str(part)[:40] for part in problem["loc"][depth:] if not _is_tag(part)]
    if problem["type"] == "combination":
        return BadRequestError(f"{problem['msg']}.", problem["ctx"]["param"])
    if not path:
        return BadRequestError(f"The body must be a JSON object: {problem['msg']}.")
    place = ".".join(path)
    return BadRequestError(f"{place}: {problem['msg']}.", place if path[0] in _TOLD_EXACTLY else path[0])


def _is_tag(part: int | str) -> bool:
    """Which member of a union was tried."""
    return isinstance(part, str) and part.startswith("<")
