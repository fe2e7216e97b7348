"""FastAPI's exception handlers: all errors before the first byte leave in one shape."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.errors import TwostepError
from server.disconnect import ClientLeftError
from server.errors import INTERNAL, ApiError, BadRequestError, error_response, kind_of, log_failure, status_response
from server.record import record_of

STATUS_CLIENT_LEFT = 499
"""nginx's number for it; seen in the log and the metrics, never sent."""


_TOLD_EXACTLY = frozenset({"messages", "tools", "tool_choice"})
"""Parameters so deep that the place in them is named, too."""


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
    return status_response(request.scope, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(request.scope, _first_problem(error))


async def _on_client_left(request: Request, error: Exception) -> Response:
    record_of(request.scope).client_left = True
    return Response(status_code=STATUS_CLIENT_LEFT)


def _first_problem(error: RequestValidationError) -> BadRequestError:
    """One sentence about the first of pydantic's findings, which names the parameter."""
    problem = error.errors()[0]
    path = [str(part)[:40] for part in problem["loc"][1:] if not _is_tag(part)]
    if problem["type"] == "combination":
        return BadRequestError(f"{problem['msg']}.", problem["ctx"]["param"])
    if not path:
        return BadRequestError(f"The body must be a JSON object: {problem['msg']}.")
    place = ".".join(path)
    return BadRequestError(f"{place}: {problem['msg']}.", place if path[0] in _TOLD_EXACTLY else path[0])


def _is_tag(part: int | str) -> bool:
    """Which member of a union was tried."""
    return isinstance(part, str) and part.startswith("<")
