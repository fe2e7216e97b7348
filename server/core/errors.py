"""What each error looks like over HTTP: one table from exception class to status, type and code.

The server's own errors, beside those of `engine.core.errors`:

    ApiError
    ├── BadRequestError               the body or a parameter is wrong; `.param` names it where one is at fault
    ├── AuthenticationError           no API key, or a wrong one
    ├── ModelNotFoundError            the request names a model that is not served
    ├── RequestNotFoundError          no request of this id is live
    ├── BodyTooLargeError             the body exceeds --max-body-bytes
    ├── HeadTooLargeError             the request's line and headers exceed --max-header-bytes
    ├── RequestTooSlowError           head or body did not arrive in time
    ├── MediaTypeError                the body is not declared as JSON
    └── NotReadyError                 loading, failed to load, or draining

They are starlette HTTPExceptions because only those pass through FastAPI's reading of the body unchanged.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from engine.core.errors import (
    ContextLengthError,
    EngineFailedError,
    EngineGivenUpError,
    EngineUnavailableError,
    OverloadedError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
)
from server.core.anthropic_errors import anthropic_error, anthropic_status, is_anthropic
from server.core.request_record import record_of

logger = logging.getLogger("twostep.server")

RETRY_AFTER_UNAVAILABLE_S = 2.0

_NO_RETRY = {"X-Should-Retry": "false"}
"""The clients of OpenAI and Anthropic obey it; else they would send again, twice, what nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one class of errors is told to the client."""

    status: int
    type: str
    code: str


class ApiError(HTTPException):
    """Base of the server's own errors. The message is one sentence that says what to do."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(kind_of(type(self)).status, message)
        self.param = param


class BadRequestError(ApiError):
    """The body or a parameter is wrong."""


class AuthenticationError(ApiError):
    """No API key, or a wrong one."""


class ModelNotFoundError(ApiError):
    """The request names a model that is not served."""


class RequestNotFoundError(ApiError):
    """No request of this id is live, or another key sent it."""


class BodyTooLargeError(ApiError):
    """The body exceeds the limit."""


class HeadTooLargeError(ApiError):
    """Request line and headers exceed the limit."""


class RequestTooSlowError(ApiError):
    """Head or body did not arrive in time."""


class MediaTypeError(ApiError):
    """The body is not declared as JSON."""


class NotReadyError(ApiError):
    """The server cannot take work now; it may later."""


_INVALID = "invalid_request_error"
INTERNAL = ErrorKind(500, "server_error", "internal_error")

ERROR_TABLE: dict[type[Exception], ErrorKind] = {
    BadRequestError: ErrorKind(400, _INVALID, "invalid_request_error"),
    RequestError: ErrorKind(400, _INVALID, "invalid_request_error"),
    ContextLengthError: ErrorKind(400, _INVALID, "context_length_exceeded"),
    AuthenticationError: ErrorKind(401, "authentication_error", "invalid_api_key"),
    ModelNotFoundError: ErrorKind(404, _INVALID, "model_not_found"),
    RequestNotFoundError: ErrorKind(404, _INVALID, "request_not_found"),
    RequestTimeoutError: ErrorKind(408, "timeout_error", "request_timeout"),
    RequestTooSlowError: ErrorKind(408, "timeout_error", "request_timeout"),
    BodyTooLargeError: ErrorKind(413, _INVALID, "request_too_large"),
    MediaTypeError: ErrorKind(415, _INVALID, "unsupported_media_type"),
    HeadTooLargeError: ErrorKind(431, _INVALID, "headers_too_large"),
    OverloadedError: ErrorKind(429, "rate_limit_error", "slow_down"),
    # Clients send again what ends with 408, 409 or 429, and that is not what an abort is for.
    RequestAbortedError: ErrorKind(499, "request_aborted_error", "request_aborted"),
    NotReadyError: ErrorKind(503, "server_error", "server_is_overloaded"),
    EngineUnavailableError: ErrorKind(503, "server_error", "server_is_overloaded"),
    EngineGivenUpError: ErrorKind(503, "server_error", "engine_given_up"),
    EngineFailedError: INTERNAL,
}

# What starlette itself raises: no such route, no such method, an unreadable body.
STATUS_TABLE: dict[int, ErrorKind] = {
    400: ERROR_TABLE[BadRequestError],
    404: ErrorKind(404, _INVALID, "not_found"),
    405: ErrorKind(405, _INVALID, "method_not_allowed"),
}


def kind_of(error: type[Exception]) -> ErrorKind:
    """The table's entry for the class or its nearest base; a class that nobody expected is our bug."""
    return next((ERROR_TABLE[base] for base in error.__mro__ if base in ERROR_TABLE), INTERNAL)


def log_failure(error: Exception, request_id: str) -> None:
    """Our bugs with their traceback; what users or the machine's state explain in one line."""
    is_bug = kind_of(type(error)) is INTERNAL
    level = logging.ERROR if is_bug else logging.WARNING
    detail = f"\n{error.detail}" if isinstance(error, EngineFailedError) and error.detail else ""
    logger.log(level, "request %s failed: %s%s", request_id, error, detail, exc_info=error if is_bug else None)


def error_body(message: str, kind: ErrorKind, param: str | None = None) -> dict[str, Any]:
    """What clients sent may be in the message: lone surrogates, which UTF-8 has not, are spelled out."""
    message = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def describe(error: Exception, request_id: str) -> tuple[ErrorKind, dict[str, Any]]:
    """An error's kind and JSON body. Of errors that are our bug, nothing but the request id leaves the process."""
    kind = kind_of(type(error))
    if kind is INTERNAL:
        return kind, error_body(f"Internal error. The server's log has the details under {request_id}.", kind)
    message = error.detail if isinstance(error, HTTPException) else str(error)
    return kind, error_body(message, kind, getattr(error, "param", None))


def error_response(scope: Scope, error: Exception) -> JSONResponse:
    """The HTTP answer to an error that was raised before the response started."""
    record = record_of(scope)
    kind, body = describe(error, record.request_id)
    headers = error_headers(kind, error)
    if isinstance(error, RequestTimeoutError) and error.is_own_limit:
        headers = _NO_RETRY
    return _response(scope, kind, body, headers)


def status_response(scope: Scope, error: HTTPException) -> JSONResponse:
    """The answer to starlette's own errors, in our shape and with its headers (`Allow` on 405)."""
    kind = STATUS_TABLE.get(error.status_code, INTERNAL)
    return _response(scope, kind, error_body(_status_message(scope, error), kind), error.headers)


def _response(scope: Scope, kind: ErrorKind, body: dict[str, Any], headers: Mapping[str, str] | None) -> JSONResponse:
    record = record_of(scope)
    record.error_code = kind.code
    if is_anthropic(scope["path"]):
        body = anthropic_error(kind.status, body["error"]["message"], record.request_id)
        return JSONResponse(body, anthropic_status(kind.status), headers=headers)
    return JSONResponse(body, kind.status, headers=headers)


def _status_message(scope: Scope, error: HTTPException) -> str:
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return f"There is no route {scope['path']}. All routes are listed at /docs."
        case HTTPStatus.METHOD_NOT_ALLOWED:
            return f"{scope['path']} does not answer to {scope['method']}."
        case _:
            return error.detail


def error_headers(kind: ErrorKind, error: Exception) -> dict[str, str] | None:
    match kind.status:
        case HTTPStatus.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        case _ if isinstance(error, EngineGivenUpError):
            return None
        case HTTPStatus.TOO_MANY_REQUESTS | HTTPStatus.SERVICE_UNAVAILABLE:
            retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_UNAVAILABLE_S)
            return {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        case _:
            return None
