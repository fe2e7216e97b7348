"""Authentication by API key: refuses requests without a valid key, and POST requests beyond the key's
`max-concurrent`."""

from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.errors import OverloadedError
from server.auth.api_keys import ApiKey
from server.auth.key_ring import KeyRing
from server.core.errors import AuthenticationError, error_response
from server.core.request_record import record_of

# Probes, scrapers and load balancers have no key, and what they read tells of no caller. The pages ask for one.
KEYLESS_PATHS = frozenset({"/", "/docs", "/metrics", "/health", "/ready", "/load"})


class AuthMiddleware:
    """Refuses with 401 or 429, or notes the request's API key in its record."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _needs_no_key(scope):
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
        with ExitStack() as counted:
            try:
                counted.enter_context(self._keys.under_way(key))
            except OverloadedError as error:
                await error_response(scope, error)(scope, receive, send)
                return

            async def uncounting_send(message: Message) -> None:
                """Sends a message. Before the last one, the request stops counting: once the client has that, it may
                send its next request."""
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    counted.close()
                await send(message)

            await self._app(scope, receive, uncounting_send)


def _needs_no_key(scope: Scope) -> bool:
    """Whether the request is answered without looking at a key. Of metrics a key shows more, so one must be right."""
    path = scope["path"]
    return path in KEYLESS_PATHS and not (path == "/metrics" and _secret_sent(scope))


def key_sent(scope: Scope, keys: KeyRing) -> ApiKey | None:
    """Returns the API key that the request carries; None if there is none, or a wrong one."""
    return keys.find(_secret_sent(scope))


def _secret_sent(scope: Scope) -> bytes:
    headers = Headers(scope=scope)
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        secret = headers.get("x-api-key", "")  # Anthropic's way
    # Strip spaces and tabs only: starlette decodes headers as latin-1, where bytes of UTF-8 can be white space, too.
    return secret.strip(" \t").encode("latin-1")
