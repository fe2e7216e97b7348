"""Responses to HTTP/1.0, which has no chunked encoding (RFC 9112, 6.1): they end when uvicorn closes the connection."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> Any:
    """Returns `app`, for one request, with a response that uvicorn writes without chunks and without a length."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_as_it_is(message: Message) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_as_it_is)

    return run
