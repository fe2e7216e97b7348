"""The state that an app's routes and middlewares share: made by `create_app`, and found through the request."""

from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from server.auth.key_ring import KeyRing
from server.core.errors import ModelNotFoundError
from server.limits.error_rate_limit import ErrorRateLimit
from server.limits.large_bodies import LargeBodies
from server.metrics.metrics import Metrics
from server.runtime.backend import Backend
from server.runtime.lifecycle import Lifecycle
from server.settings.settings import Settings
from server.telemetry.telemetry import Telemetry


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

    @property
    def backend(self) -> Backend:
        """The loaded model. Raises NotReadyError unless it is loaded."""
        return self.lifecycle.backend

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


def context_of(request: Request) -> AppContext:
    """Returns the context of the app that handles the request."""
    return cast(AppContext, request.app.state.context)
