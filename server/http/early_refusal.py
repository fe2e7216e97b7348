"""Load shedding: refuses a request on an overloaded server from its head alone, without a task, a middleware or a
route.

At ten times the load that the server can take, nine of ten requests are refused, and what a refusal costs is taken from
the running streams. Requests that need more than their head looked at are refused in `routes.generation_route` instead,
with the same response.
"""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from engine.core.errors import EngineUnavailableError, OverloadedError, TwostepError
from server.auth.api_keys import NOBODY, ApiKey
from server.core.errors import error_response
from server.core.request_record import begin_record, id_headers, peer_of, record_of
from server.limits.large_bodies import is_large
from server.middleware.access import report_request
from server.middleware.auth import key_sent
from server.routes.generation_route import GenerationRoute
from server.runtime.context import AppContext
from server.runtime.lifecycle import State

_NOT_PLAIN = frozenset({"expect", "origin", "upgrade"})


class EarlyRefusals:
    """Refuses generation requests that the engine cannot admit. One per server, used on its event loop only."""

    def __init__(self, context: AppContext, routes: Mapping[str, GenerationRoute]) -> None:
        """`routes` are the generation routes by their paths."""
        self._context = context
        self._routes = routes

    def answer_to(self, scope: Scope) -> Response | None:
        """Returns the refusal of a request, counted and logged as the app's are; None if the app is to answer it."""
        if scope["path"] not in self._routes or scope["method"] != "POST" or not _is_plain(scope):
            return None
        context = self._context
        key = NOBODY if context.keys.is_open else key_sent(scope, context.keys)
        if key is None or context.lifecycle.state is not State.READY:
            return None
        try:
            context.backend.engine.check_admission(context.tenant_of(scope, key))
        except (OverloadedError, EngineUnavailableError) as error:
            return self._refused(scope, key, error)  # in here: kept beyond it, the error and its frame form a cycle
        return None

    def caller_of(self, scope: Scope) -> str:
        """Returns the name under which the request takes its turns: its API key's, or else its address."""
        key = None if self._context.keys.is_open else key_sent(scope, self._context.keys)
        return peer_of(scope["client"]) if key is None else key.name

    def _refused(self, scope: Scope, key: ApiKey, error: TwostepError) -> Response:
        begin_record(scope)
        record = record_of(scope)
        record.key, scope["route"] = key, self._routes[scope["path"]]
        response = error_response(scope, error)
        response.raw_headers += id_headers(scope)
        record.status = response.status_code
        report_request(scope, self._context.metrics, self._context.telemetry)
        return response


def _is_plain(scope: Scope) -> bool:
    """Tells whether the request's head is enough to refuse it by."""
    headers = Headers(scope=scope)
    return not is_large(headers) and _NOT_PLAIN.isdisjoint(headers)
