"""Gives each request its record, and each response its `X-Request-Id`."""

import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.core.anthropic_errors import is_anthropic
from server.core.request_record import RequestRecord, arrival_of, attach_record, record_of

MAX_REQUEST_ID_LENGTH = 128


def is_sane_request_id(text: str) -> bool:
    """Whether it can stand in a header and in a log line: bounded, printable ASCII, no spaces."""
    return 0 < len(text) <= MAX_REQUEST_ID_LENGTH and text.isascii() and text.isprintable() and " " not in text


def begin_record(scope: Scope) -> None:
    given = Headers(scope=scope).get("x-request-id", "")
    request_id = given if is_sane_request_id(given) else f"req-{uuid.uuid4().hex}"
    attach_record(scope, RequestRecord(request_id, arrival_of(scope)))


def name_request(scope: Scope, request_id: str) -> None:
    """As its body says, unless a header does; an id that is not sane is not taken."""
    record = record_of(scope)
    if is_sane_request_id(request_id) and Headers(scope=scope).get("x-request-id") != record.request_id:
        record.request_id = request_id


def id_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """What a response says of its request's id."""
    request_id = record_of(scope).request_id.encode()
    names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)
    return [(name, request_id) for name in names]


class RecordMiddleware:
    """The outermost one: everything else may rely on `record_of(scope)`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_record(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record_of(scope).status = message["status"]
                message["headers"] = [*message["headers"], *id_headers(scope)]
            await send(message)

        await self._app(scope, receive, send_with_id)
