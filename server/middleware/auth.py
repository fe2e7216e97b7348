"""Refuses requests without one of the API keys."""

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import AuthenticationError, error_response

OPEN_PATHS = frozenset({"/metrics", "/health", "/ready"})


class AuthMiddleware:
    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._api_keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("The API key is missing or wrong. Send it as: Authorization: Bearer <key>.")
        await error_response(scope, error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = key.strip().encode("latin-1")  # how starlette decodes header bytes
        # Every key is compared, in constant time each: how long it takes says nothing about any of them.
        return any([secrets.compare_digest(given, api_key) for api_key in self._api_keys])
