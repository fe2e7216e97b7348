"""What the server notes about one HTTP request while it runs: for the access log, the metrics and the response."""

from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from server.timings import PhaseReport


@dataclass(slots=True)
class RequestRecord:
    """Mutable; lives in the ASGI scope of its request."""

    request_id: str
    arrival_s: float
    """On `time.monotonic()`, when the request's head was read."""
    status: int = 0
    error_code: str | None = None
    report: PhaseReport | None = None
    """Of requests that reached the engine: its tokens and times so far, complete at the end."""


def attach_record(scope: Scope, record: RequestRecord) -> None:
    scope.setdefault("state", {})["record"] = record


def record_of(scope: Scope) -> RequestRecord:
    """Only inside `RecordMiddleware`, which wraps the whole app."""
    return cast(RequestRecord, scope["state"]["record"])
