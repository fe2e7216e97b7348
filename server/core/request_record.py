"""What the server notes about one HTTP request while it runs: for the access log, the metrics and the response."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from server.auth.api_keys import NOBODY, ApiKey
from server.core.timings import PhaseReport


@dataclass(slots=True)
class RequestRecord:
    """Mutable; lives in the ASGI scope of its request."""

    request_id: str
    arrival_s: float
    """On `time.monotonic()`, when the request's head was read."""
    key: ApiKey = NOBODY
    """Who calls."""
    status: int = 0
    error_code: str | None = None
    """Of the answer."""
    broken_by: str | None = None
    """Code of the error that ended a stream after it had begun."""
    client_left: bool = False
    """Before the response was complete."""
    report: Callable[[], PhaseReport] | None = None
    """Of requests that got a first token: tokens and times so far. A stream that was cut has no times after the first
    token, but its tokens are counted."""


def note_arrival(scope: Scope) -> None:
    """Of a request that is looked at later, and gets its record then."""
    scope.setdefault("state", {})["arrival_s"] = time.monotonic()


def arrival_of(scope: Scope) -> float:
    noted: float | None = scope.get("state", {}).get("arrival_s")
    return time.monotonic() if noted is None else noted


def attach_record(scope: Scope, record: RequestRecord) -> None:
    scope.setdefault("state", {})["record"] = record


def record_of(scope: Scope) -> RequestRecord:
    """Only inside `RecordMiddleware`, which wraps the whole app."""
    return cast(RequestRecord, scope["state"]["record"])


def caller_of(scope: Scope) -> str:
    """Who calls, for what is bounded by caller: the API key, and without one the address."""
    return record_of(scope).key.name or peer_of(scope["client"])


def peer_of(client: tuple[str, int] | None) -> str:
    """No API key has such a name."""
    return f"peer {client[0] if client else ''}"
