"""Errors in the form of Anthropic's Messages API: its statuses, its types and its body."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Statuses that Anthropic's API does not have -> the ones it has.
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
    """Tells whether the path belongs to the Messages API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_status(status: int) -> int:
    return _STATUSES.get(status, status)


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Returns the JSON body of an error, which is also the `error` event of a stream. `status` is the server's own."""
    error = {"type": _TYPES[anthropic_status(status)], "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
