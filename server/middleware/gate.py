"""Refuses requests with 503 while the model loads and after loading failed, and new work while the server drains."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.core.errors import NotReadyError, error_response
from server.runtime.lifecycle import Lifecycle, State

OPEN_PATHS = frozenset({"/", "/docs", "/metrics", "/version", "/api/version"})


class GateMiddleware:
    """Refuses requests that the server's `State` does not allow."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await error_response(scope, NotReadyError(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        if scope["path"] in OPEN_PATHS:
            return None
        match self._lifecycle.state:
            case State.READY:
                return None
            case State.DRAINING if scope["method"] != "POST":
                return None
            case State.LOADING:
                return "The model is loading; try again in a moment."
            case State.FAILED:
                return f"The model could not be loaded: {self._lifecycle.failure}"
            case _:
                return "The server is shutting down; send the request to another one."
