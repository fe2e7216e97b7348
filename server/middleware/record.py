"""Gives each request its record, and each response its `X-Request-Id`."""

import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.anthropic.errors import is_anthropic
from server.record import RequestRecord, attach_record

MAX_REQUEST_ID_LENGTH = 128


def is_sane_request_id(text: str) -> bool:
    """Whether it can stand in a header and in a log line: bounded, printable ASCII, no spaces."""
    return 0 < len(text) <= MAX_REQUEST_ID_LENGTH and text.isascii() and text.isprintable() and " " not in text


class RecordMiddleware:
    """The outermost one: everything else may rely on `record_of(scope)`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        record = RequestRecord(given if is_sane_request_id(given) else f"req-{uuid.uuid4().hex}", time.monotonic())
        attach_record(scope, record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = record.request_id.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", own)]
                if is_anthropic(scope["path"]):
                    message["headers"].append((b"request-id", own))
            await send(message)

        await self._app(scope, receive, send_with_id)
