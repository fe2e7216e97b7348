"""Attaches the record to each request, and `X-Request-Id` to each response. Gives back what the request held."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.core.request_record import begin_record, id_headers, record_of


class RecordMiddleware:
    """The outermost middleware: all others may rely on `record_of(scope)`."""

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

        with record_of(scope).held:
            await self._app(scope, receive, send_with_id)
