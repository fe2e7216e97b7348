"""Responses as bytes, for what is answered below ASGI."""

from collections.abc import Iterable

from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.core.errors import describe, error_headers


def raw_answer(response: Response, headers: Iterable[tuple[bytes, bytes]], keep_alive: bool) -> bytes:
    """Returns the response as it is written to the socket, with `headers` beside its own."""
    fields = [name + b": " + value + b"\r\n" for name, value in (*headers, *response.raw_headers)]
    if not keep_alive:
        fields.append(b"connection: close\r\n")
    return b"".join([STATUS_LINE[response.status_code], *fields, b"\r\n", response.body])


def raw_error(error: Exception) -> bytes:
    """Returns the response to an error that arose before there was a request; the connection closes after it."""
    kind, body = describe(error, request_id="")
    return raw_answer(JSONResponse(body, kind.status, headers=error_headers(kind, error)), (), keep_alive=False)
