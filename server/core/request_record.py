"""The record of one HTTP request, kept in its ASGI scope, for the access log, the metrics and the response headers."""

import ipaddress
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

from starlette.datastructures import Headers
from starlette.types import Scope

from engine.core.outputs import RequestOutput
from engine.core.sampling_params import SamplingParams
from server.auth.api_keys import NOBODY, ApiKey
from server.core.anthropic_errors import is_anthropic
from server.core.promises import NO_PROMISES, Promises
from server.core.timings import PhaseReport

MAX_REQUEST_ID_LENGTH = 128


@dataclass(slots=True)
class RequestRecord:
    """Facts about one HTTP request, filled in while it runs."""

    request_id: str
    arrival_s: float
    """Time on `time.monotonic()` when the request's head was read."""
    key: ApiKey = NOBODY
    """The API key that the request carries; NOBODY on a server without keys, and before authentication."""
    status: int = 0
    """HTTP status of the response; 0 until it starts."""
    error_code: str | None = None
    """Error code in the response's body; None if the request was not refused."""
    broken_by: str | None = None
    """Code of the error that ended a stream after it had begun."""
    client_left: bool = False
    """Whether the client disconnected before the response was complete."""
    model: str | None = None
    """Name of the model that answers; None for requests that ask none."""
    params: SamplingParams | None = None
    """Parameters of its first sequence; None if it generates none."""
    promises: Promises = NO_PROMISES
    """What the client wants to be promised."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """How each sequence ended: its index among the request's -> stop, length, abort or error."""
    report: Callable[[], PhaseReport] | None = None
    """Returns the tokens and times so far; None before the first token. A stream that was cut off has no times after
    its first token, but its tokens are counted."""
    held: ExitStack = field(default_factory=ExitStack)
    """What the request holds until its response is written, or its client has left."""

    def note_end(self, sequence: int, output: RequestOutput) -> None:
        """Keeps how one sequence ended, if this is its last output."""
        if output.finish_reason is not None:
            self.finish_reasons[sequence] = output.finish_reason.value


def note_arrival(scope: Scope) -> None:
    """Stores the arrival time of a request that is delayed before its record is made; the first one stands."""
    scope.setdefault("state", {}).setdefault("arrival_s", time.monotonic())


def arrival_of(scope: Scope) -> float:
    """Returns the stored arrival time of the request, or now, on `time.monotonic()`."""
    noted: float | None = scope.get("state", {}).get("arrival_s")
    return time.monotonic() if noted is None else noted


def attach_record(scope: Scope, record: RequestRecord) -> None:
    scope.setdefault("state", {})["record"] = record


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record of the request. Call only below `RecordMiddleware`, which wraps the whole app."""
    return cast(RequestRecord, scope["state"]["record"])


def caller_of(scope: Scope) -> str:
    """Returns the name under which limits per client count the request: its API key's, or else its address."""
    return record_of(scope).key.name or peer_of(scope["client"])


def peer_of(client: tuple[str, int] | None) -> str:
    """Returns the name of an address under which limits per client count its requests. No API key has such a name. One
    of IPv6 counts by its /64, of which a single client usually has all."""
    host = client[0] if client else ""
    return f"peer {_network_of(host) if ':' in host else host}"


def _network_of(host: str) -> str:
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def is_sane_request_id(text: str) -> bool:
    """Tells whether a request id can stand in a header and in a log line: bounded, printable ASCII, no spaces."""
    return 0 < len(text) <= MAX_REQUEST_ID_LENGTH and text.isascii() and text.isprintable() and " " not in text


def begin_record(scope: Scope) -> None:
    """Attaches a new record to the request, with the id of its `X-Request-Id` header if that is sane."""
    given = Headers(scope=scope).get("x-request-id", "")
    request_id = given if is_sane_request_id(given) else f"req-{uuid.uuid4().hex}"
    attach_record(scope, RequestRecord(request_id, arrival_of(scope)))


def name_request(scope: Scope, request_id: str) -> None:
    """Gives the request the id that its body names. An id in a header wins, and one that is not sane is ignored."""
    record = record_of(scope)
    if is_sane_request_id(request_id) and Headers(scope=scope).get("x-request-id") != record.request_id:
        record.request_id = request_id


def id_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Returns the response headers that name the request's id."""
    request_id = record_of(scope).request_id.encode()
    names = (b"x-request-id", b"request-id") if is_anthropic(scope["path"]) else (b"x-request-id",)
    return [(name, request_id) for name in names]
