"""Errors over HTTP: one table from exception class to status, type and code, and the responses made from it.

The server's own errors, beside those of `engine.core.errors`:

    ApiError
    ├── BadRequestError               the body or a parameter is wrong; `.param` names it where one is at fault
    ├── AuthenticationError           no API key, or a wrong one
    ├── ModelNotFoundError            the request names a model that is not served
    ├── RequestNotFoundError          no request with this id is live, or another API key sent it
    ├── BodyTooLargeError             the body exceeds --max-body-bytes
    ├── HeadTooLargeError             the request's line and headers exceed --max-header-bytes
    ├── RequestTooSlowError           head or body did not arrive in time
    ├── MediaTypeError                the body is not declared as JSON
    └── NotReadyError                 loading, failed to load, or draining

They are starlette HTTPExceptions because FastAPI turns every other exception raised while it reads a body into a 400.
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
    AdapterError,
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
from server.core.paths import is_ollama
from server.core.request_record import record_of

logger = logging.getLogger("twostep.server")

RETRY_AFTER_UNAVAILABLE_S = 2.0

_NO_RETRY = {"X-Should-Retry": "false"}
"""Headers that stop the OpenAI and Anthropic clients from retrying (twice, by default) a request whose own deadline has
passed."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """HTTP status, `type` and `code` of one class of errors."""

    status: int
    type: str
    code: str


class ApiError(HTTPException):
    """Base of the server's own errors. The message is one sentence that tells the client what to do."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(kind_of(type(self)).status, message)
        self.param = param


class BadRequestError(ApiError):
    """The body or a parameter is wrong."""


class AuthenticationError(ApiError):
    """The request has no API key, or a wrong one."""


class ModelNotFoundError(ApiError):
    """The request names a model that is not served."""


class RequestNotFoundError(ApiError):
    """No request with this id is live, or another API key sent it."""


class BodyTooLargeError(ApiError):
    """The body exceeds --max-body-bytes."""


class HeadTooLargeError(ApiError):
    """Request line and headers together exceed --max-header-bytes."""


class RequestTooSlowError(ApiError):
    """The request's head or body did not arrive within --header-timeout or --body-timeout."""


class MediaTypeError(ApiError):
    """The body is not declared as JSON."""


class NotReadyError(ApiError):
    """The server cannot take work now: it is loading, failed to load, is draining, or has no connection left."""


_INVALID = "invalid_request_error"
INTERNAL = ErrorKind(500, "server_error", "internal_error")

ERROR_TABLE: dict[type[Exception], ErrorKind] = {
    BadRequestError: ErrorKind(400, _INVALID, "invalid_request_error"),
    AdapterError: ErrorKind(400, _INVALID, "invalid_request_error"),
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
    # 499, since clients retry after 408, 409 and 429, which would undo the abort.
    RequestAbortedError: ErrorKind(499, "request_aborted_error", "request_aborted"),
    NotReadyError: ErrorKind(503, "server_error", "server_is_overloaded"),
    EngineUnavailableError: ErrorKind(503, "server_error", "server_is_overloaded"),
    EngineGivenUpError: ErrorKind(503, "server_error", "engine_given_up"),
    EngineFailedError: INTERNAL,
}

# Errors that starlette itself raises: no such route, no such method, an unreadable body.
STATUS_TABLE: dict[int, ErrorKind] = {
    400: ERROR_TABLE[BadRequestError],
    404: ErrorKind(404, _INVALID, "not_found"),
    405: ErrorKind(405, _INVALID, "method_not_allowed"),
}


def kind_of(error: type[Exception]) -> ErrorKind:
    """Returns the table's entry for the class or its nearest base; INTERNAL (a bug of this program) if it has none."""
    return next((ERROR_TABLE[base] for base in error.__mro__ if base in ERROR_TABLE), INTERNAL)


def log_failure(error: Exception, request_id: str) -> None:
    """Logs a failed request: a bug of this program with its traceback, any other error in one line."""
    is_bug = kind_of(type(error)) is INTERNAL
    level = logging.ERROR if is_bug else logging.WARNING
    detail = f"\n{error.detail}" if isinstance(error, EngineFailedError) and error.detail else ""
    logger.log(level, "request %s failed: %s%s", request_id, error, detail, exc_info=error if is_bug else None)


def error_body(message: str, kind: ErrorKind, param: str | None = None) -> dict[str, Any]:
    """Returns the JSON body of an error. The message may quote the client, so lone surrogates, which UTF-8 cannot
    encode, are written as escapes."""
    message = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}


def describe(error: Exception, request_id: str) -> tuple[ErrorKind, dict[str, Any]]:
    """Returns an error's kind and JSON body. Of an internal error, nothing but the request id leaves the process."""
    kind = kind_of(type(error))
    if kind is INTERNAL:
        return kind, error_body(f"Internal error. The server's log has the details under {request_id}.", kind)
    message = error.detail if isinstance(error, HTTPException) else str(error)
    return kind, error_body(message, kind, getattr(error, "param", None))


def error_response(scope: Scope, error: Exception) -> JSONResponse:
    """Returns the response to an error that was raised before the request's response started."""
    record = record_of(scope)
    kind, body = describe(error, record.request_id)
    headers = error_headers(kind, error)
    if isinstance(error, RequestTimeoutError) and error.is_own_limit:
        headers = _NO_RETRY
    return _response(scope, kind, body, headers)


def status_response(scope: Scope, error: HTTPException) -> JSONResponse:
    """Returns the response to one of starlette's own errors, with the body of all errors here and starlette's headers
    (`Allow` on 405)."""
    kind = STATUS_TABLE.get(error.status_code, INTERNAL)
    return _response(scope, kind, error_body(_status_message(scope, error), kind), error.headers)


def _response(scope: Scope, kind: ErrorKind, body: dict[str, Any], headers: Mapping[str, str] | None) -> JSONResponse:
    record = record_of(scope)
    record.error_code = kind.code
    if is_anthropic(scope["path"]):
        body = anthropic_error(kind.status, body["error"]["message"], record.request_id)
        return JSONResponse(body, anthropic_status(kind.status), headers=headers)
    if is_ollama(scope["path"]):
        body = {"error": body["error"]["message"]}
    return JSONResponse(body, kind.status, headers=headers)


def _status_message(scope: Scope, error: HTTPException) -> str:
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return f"There is no route {scope['path']}. All routes are listed at /docs."
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "")
            return f"{scope['path']} does not answer to {scope['method']}: use {allowed.replace(', ', ' or ')}."
        case _:
            return error.detail


def error_headers(kind: ErrorKind, error: Exception) -> dict[str, str] | None:
    """Returns the headers that an error's status calls for: `Retry-After`, unless waiting cannot help, and
    `WWW-Authenticate`."""
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
