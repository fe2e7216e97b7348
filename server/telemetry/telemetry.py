"""What is told of each request when it ends, and the way that does no more than find the trace it belongs to."""

from collections.abc import Mapping
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from server.core.timings import PhaseReport
from server.core.trace_context import trace_id_of


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
        return client_trace(scope)

    def close(self) -> None:
        pass


def client_trace(scope: Scope) -> dict[str, str]:
    """Returns the `trace_id` that the client gave; empty if it gave none."""
    trace_id = trace_id_of(Headers(scope=scope))
    return {} if trace_id is None else {"trace_id": trace_id}
