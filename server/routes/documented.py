"""The error shape, for /openapi.json."""

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    error: ErrorDetail


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These, and "default": without it FastAPI would document a 422 of its own, which is never sent."""
    described: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": HTTPStatus(status).phrase} for status in statuses
    }
    return described | {"default": {"model": ErrorResponse, "description": "Any other error"}}
