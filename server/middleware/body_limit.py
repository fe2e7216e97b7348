"""Bounds the request body while it is read, so that a chunked one without a declared length is bounded, too."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import BodyTooLargeError, error_response


class BodyLimitMiddleware:
    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            await error_response(scope, self._error())(scope, receive, send)
            return
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._error()
            return message

        await self._app(scope, counting_receive, send)

    def _error(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The request body exceeds {self._max_body_bytes} bytes (--max-body-bytes).")
