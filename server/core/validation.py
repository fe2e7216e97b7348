"""Pydantic's validation errors -> one sentence about the first of them, which names the parameter."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from server.core.errors import BadRequestError

_NESTED_PARAMS = frozenset({"messages", "tools", "tool_choice", "input", "system", "text"})
"""Parameters that are nested so deeply that `param` names the place within them."""


def problem_of(errors: Sequence[ErrorDetails | Any], depth: int = 0) -> BadRequestError:
    """Returns the error to answer with, about the first of `errors`. `depth` parts of a location come before the
    parameter's name."""
    problem = errors[0]
    path = [str(part)[:40] for part in problem["loc"][depth:] if not _is_tag(part)]
    if problem["type"] == "combination":
        return BadRequestError(f"{problem['msg']}.", problem["ctx"]["param"])
    if not path:
        return BadRequestError(f"The body must be a JSON object: {problem['msg']}.")
    place = ".".join(path)
    return BadRequestError(f"{place}{_told(problem)}.", place if path[0] in _NESTED_PARAMS else path[0])


def _told(problem: ErrorDetails | Any) -> str:
    """Returns what is wrong at a place, to be read behind its name."""
    match problem["type"]:
        case "extra_forbidden":
            return " is no parameter"
        case "rule":
            return f" {problem['msg']}"
        case _:
            return f": {problem['msg']}"


def _is_tag(part: int | str) -> bool:
    """Tells whether a part of a location is a union member's tag (see `protocol.tags`) and no field."""
    return isinstance(part, str) and part.startswith("<")
