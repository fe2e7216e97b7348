"""What the routes share: made by `create_app`, found through the request."""

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


@dataclass(frozen=True, slots=True)
class AppContext:
    settings: Settings
    metrics: Metrics
    lifecycle: Lifecycle
    keys: KeyRing
    large_bodies: LargeBodies
    error_rate_limit: ErrorRateLimit

    @property
    def backend(self) -> Backend:
        """Raises NotReadyError unless the model is loaded."""
        return self.lifecycle.backend

    def check_model(self, name: str | None) -> str:
        """The name to answer with; the model's own where the client gave none. Raises ModelNotFoundError."""
        names = self.settings.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise ModelNotFoundError(
                f"The model {name[:100]!r} is not served here; this server has {', '.join(map(repr, names))}.", "model"
            )
        return name


def context_of(request: Request) -> AppContext:
    return cast(AppContext, request.app.state.context)
