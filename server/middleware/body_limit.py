"""Bounds a request's body in size and time while it is read: also a chunked one, whose length is not declared."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.core.errors import BodyTooLargeError, RequestTooSlowError, error_response

MIN_BYTES_PER_S = 16 * 1024
"""Rate at which received bytes extend --body-timeout."""


class BodyLimitMiddleware:
    """Refuses bodies that exceed --max-body-bytes (413) or --body-timeout (408)."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            await error_response(scope, self._too_large())(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        num_bytes, is_complete, waited_s = 0, False, 0.0
        clock = asyncio.get_running_loop().time

        async def bounded_receive() -> Message:
            nonlocal num_bytes, is_complete, waited_s
            if is_complete:  # the next message is the client's disconnect, whenever that comes
                return await receive()
            start_s = clock()
            try:
                async with asyncio.timeout_at(start_s + self._timeout_s + num_bytes / MIN_BYTES_PER_S - waited_s):
                    message = await receive()
            except TimeoutError:
                raise RequestTooSlowError("The request's body took too long (--body-timeout).") from None
            waited_s += clock() - start_s  # only this counts: between messages, a large body may wait for a slot
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return bounded_receive

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The request body exceeds {self._max_body_bytes} bytes (--max-body-bytes).")
