"""What is told of each request when it ends, and the way that does no more than find the trace it belongs to."""

import re
from collections.abc import Mapping
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from server.core.timings import PhaseReport

_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)


class Telemetry(Protocol):
    """Exports requests. Used on one event loop only."""

    def on_request(self, scope: Scope, report: PhaseReport | None, elapsed_s: float) -> Mapping[str, str]:
        """Takes a request at its end, `elapsed_s` after its arrival. Returns what its log line has to name its trace:
        `trace_id`, and `span_id` if there is a span of it."""

    def close(self) -> None:
        """Exports what is left, for a few seconds at most. Blocks: call it when no request is left."""


class NullTelemetry:
    """Implements `Telemetry`, and exports nothing."""

    def on_request(self, scope: Scope, report: PhaseReport | None, elapsed_s: float) -> Mapping[str, str]:
        return trace_id_of(scope)

    def close(self) -> None:
        pass


def trace_id_of(scope: Scope) -> dict[str, str]:
    """Returns the `trace_id` of the request's `traceparent` header, as W3C's Trace Context defines it; empty without
    one that is valid."""
    match = _TRACEPARENT.fullmatch(Headers(scope=scope).get("traceparent", ""))
    return {} if match is None else {"trace_id": match[1]}
