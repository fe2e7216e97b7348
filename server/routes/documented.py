"""The documentation of errors in /openapi.json."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from server.protocol.anthropic import AnthropicErrorResponse
from server.protocol.ollama import OllamaError


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    error: ErrorDetail


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the documentation of these statuses and of "default": without it FastAPI would document a 422 of its own,
    which is never sent."""
    return _described(ErrorResponse, statuses)


def anthropic_error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return _described(AnthropicErrorResponse, statuses)


def ollama_error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return _described(OllamaError, statuses)


def _described(model: type[BaseModel], statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    described: dict[int | str, dict[str, Any]] = {
        status: {"model": model, "description": _PHRASES.get(status) or HTTPStatus(status).phrase}
        for status in statuses
    }
    return described | {"default": {"model": model, "description": "Any other error"}}


_PHRASES = {529: "Overloaded"}
