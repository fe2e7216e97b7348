"""FastAPI's exception handlers: all errors before the first byte of a response have one form."""

from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from engine.core.errors import TwostepError
from server.core.errors import INTERNAL, ApiError, error_response, kind_of, log_failure, status_response
from server.core.request_record import record_of
from server.core.validation import problem_of
from server.limits.disconnect import ClientLeftError
from server.middleware.access import METHODS

STATUS_CLIENT_LEFT = 499
"""nginx's status for a client that disconnected; it appears in the log and the metrics. A client gets a 499 only if its
request was aborted through /v1/requests."""


def add_exception_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TwostepError, _on_error)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_status)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientLeftError, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)


async def _on_error(request: Request, error: Exception) -> Response:
    if kind_of(type(error)) is INTERNAL:
        log_failure(error, record_of(request.scope).request_id)
    return error_response(request.scope, error)


async def _on_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error.headers = {"Allow": ", ".join(_methods_of(request))}  # starlette names the methods of one route
    return status_response(request.scope, error)


def _methods_of(request: Request) -> list[str]:
    """Returns the methods that the request's path has."""
    return [
        method
        for method in sorted(METHODS)
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(request.scope, problem_of(error.errors(), depth=1))


async def _on_client_left(request: Request, error: Exception) -> Response:
    record_of(request.scope).client_left = True
    return Response(status_code=STATUS_CLIENT_LEFT)
