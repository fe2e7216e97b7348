"""The state that an app's routes and middlewares share: made by `create_app`, and found through the request."""

from dataclasses import dataclass
from typing import cast

from starlette.requests import Request
from starlette.types import Scope

from engine.core.generation_request import Tenant
from server.auth.api_keys import ApiKey
from server.auth.key_ring import KeyRing
from server.core.errors import ModelNotFoundError
from server.core.request_record import peer_of, record_of
from server.limits.answer_memory import AnswerMemory
from server.limits.error_rate_limit import ErrorRateLimit
from server.limits.large_bodies import LargeBodies
from server.metrics.metrics import Metrics
from server.runtime.backend import Backend
from server.runtime.lifecycle import Lifecycle
from server.settings.settings import Settings
from server.telemetry.telemetry import Telemetry

_ADDRESS_SHARE = 1 / 16
"""Share of the places to wait that are kept for each address, with --fair-by address: how many come is unknown."""


@dataclass(frozen=True, slots=True)
class AppContext:
    """Shared state of one app."""

    settings: Settings
    metrics: Metrics
    telemetry: Telemetry
    lifecycle: Lifecycle
    keys: KeyRing
    large_bodies: LargeBodies
    error_rate_limit: ErrorRateLimit
    answer_memory: AnswerMemory

    @property
    def backend(self) -> Backend:
        """The loaded model. Raises NotReadyError unless it is loaded."""
        return self.lifecycle.backend

    def tenant_of(self, scope: Scope, key: ApiKey) -> Tenant:
        """Returns whom the request is counted for: its API key, or with --fair-by address its client's address."""
        if self.settings.fair_by == "address":
            return Tenant(peer_of(scope["client"]), _ADDRESS_SHARE)
        return Tenant(key.name, self.keys.share_of(key))

    def check_model(self, name: str | None) -> str:
        """Returns the name for the response, of the model or of an adapter; the model's own where the client sent none.
        Raises ModelNotFoundError."""
        names = [*self.settings.model_names, *self.backend.engine.adapters.loaded]
        if name is None:
            return names[0]
        if name not in names:
            raise ModelNotFoundError(
                f"The model {name[:100]!r} is not served here; this server has {', '.join(map(repr, names))}.", "model"
            )
        return name


def tenant_of(request: Request) -> Tenant:
    """Returns whom the request, whose API key is known, is counted for."""
    return context_of(request).tenant_of(request.scope, record_of(request.scope).key)


def context_of(request: Request) -> AppContext:
    """Returns the context of the app that handles the request."""
    return cast(AppContext, request.app.state.context)
