"""Errors as Anthropic's API tells them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Statuses that API does not have -> those it has.
_STATUSES: Mapping[int, int] = MappingProxyType({408: 504, 415: 400, 431: 413, 499: 400, 503: 529})

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_status(status: int) -> int:
    return _STATUSES.get(status, status)


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """`status` is the server's own. The same object is an event of a stream."""
    error = {"type": _TYPES[anthropic_status(status)], "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
