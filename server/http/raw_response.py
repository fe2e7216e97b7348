"""Answers that are written by no app, as bytes."""

from collections.abc import Iterable

from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.core.errors import describe, error_headers


def raw_answer(response: Response, headers: Iterable[tuple[bytes, bytes]], keep_alive: bool) -> bytes:
    """`headers` come beside its own."""
    fields = [name + b": " + value + b"\r\n" for name, value in (*headers, *response.raw_headers)]
    if not keep_alive:
        fields.append(b"connection: close\r\n")
    return b"".join([STATUS_LINE[response.status_code], *fields, b"\r\n", response.body])


def raw_error(error: Exception) -> bytes:
    """To what never became a request. The connection is closed behind it."""
    kind, body = describe(error, request_id="")
    return raw_answer(JSONResponse(body, kind.status, headers=error_headers(kind, error)), (), keep_alive=False)
