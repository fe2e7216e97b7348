"""What the server notes about one HTTP request while it runs: for the access log, the metrics and the response."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from starlette.datastructures import Headers
from starlette.types import Scope

from server.auth.api_keys import NOBODY, ApiKey
from server.core.anthropic_errors import is_anthropic
from server.core.timings import PhaseReport

MAX_REQUEST_ID_LENGTH = 128


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


def is_sane_request_id(text: str) -> bool:
    """Whether it can stand in a header and in a log line: bounded, printable ASCII, no spaces."""
    return 0 < len(text) <= MAX_REQUEST_ID_LENGTH and text.isascii() and text.isprintable() and " " not in text


def begin_record(scope: Scope) -> None:
    given = Headers(scope=scope).get("x-request-id", "")
    request_id = given if is_sane_request_id(given) else f"req-{uuid.uuid4().hex}"
    attach_record(scope, RequestRecord(request_id, arrival_of(scope)))


def name_request(scope: Scope, request_id: str) -> None:
    """As its body says, unless a header does; an id that is not sane is not taken."""
    record = record_of(scope)
    if is_sane_request_id(request_id) and Headers(scope=scope).get("x-request-id") != record.request_id:
        record.request_id = request_id


def id_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """What a response says of its request's id."""
    request_id = record_of(scope).request_id.encode()
    names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)
    return [(name, request_id) for name in names]
