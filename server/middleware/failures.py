"""The last resort: an exception that nothing else handles is a bug of this program. The client gets 500, and the log
the traceback and the request's id."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.host.rust_panics import panics_as
from server.core.errors import error_response, log_failure
from server.core.request_record import record_of


class FailureMiddleware:
    """Turns unhandled exceptions into responses, unless the response has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            with panics_as(RuntimeError):
                await self._app(scope, receive, watched_send)
        except Exception as error:
            log_failure(error, record_of(scope).request_id)
            if not has_started:
                await error_response(scope, error)(scope, receive, send)
