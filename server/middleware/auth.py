"""Refuses requests without one of the API keys, and work beyond what its key may have at once."""

from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.errors import OverloadedError
from server.auth.api_keys import ApiKey
from server.auth.key_ring import KeyRing
from server.core.errors import AuthenticationError, error_response
from server.core.request_record import record_of

KEYLESS_PATHS = frozenset({"/", "/metrics", "/health", "/ready"})  # the page of "/" asks for the key itself


class AuthMiddleware:
    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in KEYLESS_PATHS:
            await self._app(scope, receive, send)
            return
        key = key_sent(scope, self._keys)
        if key is None:
            error = AuthenticationError("The API key is missing or wrong. Send it as: Authorization: Bearer <key>.")
            await error_response(scope, error)(scope, receive, send)
            return
        record_of(scope).key = key
        if scope["method"] == "POST":
            await self._work(key, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _work(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as place:
            try:
                place.enter_context(self._keys.under_way(key))
            except OverloadedError as error:
                await error_response(scope, error)(scope, receive, send)
                return

            async def leaving_send(message: Message) -> None:
                """The place is free before the client can know that its response is complete, and send the next."""
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    place.close()
                await send(message)

            await self._app(scope, receive, leaving_send)


def key_sent(scope: Scope, keys: KeyRing) -> ApiKey | None:
    headers = Headers(scope=scope)
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        secret = headers.get("x-api-key", "")  # Anthropic's way
    # Starlette decodes header bytes as latin-1, where parts of a character of UTF-8 can be white space, too.
    return keys.find(secret.strip(" \t").encode("latin-1"))
