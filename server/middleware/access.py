"""The access log and the HTTP metrics: one line and one observation per request, at its end."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.errors import OverloadedError
from server.core.errors import ERROR_TABLE
from server.core.promises import asked_in
from server.core.request_record import RequestRecord, record_of
from server.core.timings import PhaseReport
from server.metrics.metrics import Metrics
from server.runtime.lifecycle import Lifecycle
from server.telemetry.telemetry import Telemetry

logger = logging.getLogger("twostep.access")

PROBES = frozenset(
    {"/health", "/ready", "/metrics", "/load", "/stats", "/stats/timeline", "/stats/diagnosis", "/v1/requests"}
)
"""Paths that are polled: requests for them are logged at the level debug."""
_LOGGED = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "queue_ms",
    "remote_prefill_ms",
    "prefill_ms",
    "ttft_ms",
)
_LOGGED_AT_THE_END = ("decode_ms", "itl_ms", "e2e_ms")  # a stream that was cut off has none of them
_SHED = ERROR_TABLE[OverloadedError].code
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that have a label of their own in the metrics; all others are OTHER."""


class AccessMiddleware:
    """Reports each request at its end, and counts the requests under way, which a drain waits for."""

    def __init__(
        self, app: ASGIApp, routes: Sequence[Route], metrics: Metrics, telemetry: Telemetry, lifecycle: Lifecycle
    ) -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics
        self._telemetry = telemetry
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._lifecycle.request_under_way():
            try:
                await self._app(scope, receive, send)
            finally:
                if "route" not in scope:  # refused before routing
                    scope["route"] = self._route_of(scope["path"])
                report_request(scope, self._metrics, self._telemetry)

    def _route_of(self, path: str) -> Route | None:
        return next((route for route in self._routes if route.path_regex.match(path)), None)


def report_request(scope: Scope, metrics: Metrics, telemetry: Telemetry) -> None:
    """Logs, counts and exports a request. Call once, at its end."""
    record = record_of(scope)
    elapsed_s = time.monotonic() - record.arrival_s
    report = None if record.report is None else record.report()
    record.report = None  # which refers to the record: a cycle would wait for the garbage collector
    timings = None if report is None else report.body()  # which sorts all gaps: once
    _count(scope, metrics, report, elapsed_s)
    if timings is not None:
        answer = {"id": record.request_id, "model": record.model, "status": record.status, "finish": _finish(record)}
        metrics.on_answer(record.key.name, record.arrival_s, answer | {"timings": timings})
    trace = telemetry.on_request(scope, report, elapsed_s)
    level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
    if logger.isEnabledFor(level):
        _log(level, scope, elapsed_s, {**_fields(scope, timings), **trace})


def _count(scope: Scope, metrics: Metrics, report: PhaseReport | None, elapsed_s: float) -> None:
    record = record_of(scope)
    metrics.on_http_request(_handler(scope), _method(scope), record.status, elapsed_s)
    if scope["method"] == "POST" and record.error_code is not None:
        metrics.on_rejection(record.error_code)
    if scope["method"] == "POST" and record.key.name:
        metrics.on_key_request(record.key.name, None if report is None else report.counts, record.error_code)
    if record.broken_by is not None:
        metrics.on_broken_stream(record.broken_by)
    for promise, outcome in _promises(scope, report, elapsed_s):
        metrics.on_promise(promise, outcome)


def _log(level: int, scope: Scope, elapsed_s: float, fields: Mapping[str, str | float | int | None]) -> None:
    line = {
        "method": _method(scope),
        "path": _path(scope),
        "status": record_of(scope).status,
        "duration_ms": round(elapsed_s * 1e3, 3),
    }
    notes = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.log(level, "%s %s %d %.1fms %s", *line.values(), notes, extra={"fields": {**line, **fields}})


def _promises(scope: Scope, report: PhaseReport | None, elapsed_s: float) -> Iterator[tuple[str, str]]:
    """Yields each promise that the request asked for, with what became of it."""
    record = record_of(scope)
    promises = record.promises
    if report is not None:
        yield from promises.outcomes(report)
    elif record.error_code == _SHED:
        yield from ((name, "refused") for name in asked_in(Headers(scope=scope)))  # often before they were read
    elif promises.ttft_s is not None and elapsed_s > promises.ttft_s:  # it ended without a token, however it did
        yield "ttft", "missed"


def _method(scope: Scope) -> str:
    """Returns the request's method as its label in the metrics."""
    return scope["method"] if scope["method"] in METHODS else "OTHER"


def _handler(scope: Scope) -> str:
    """Returns the path template of the request's route, or "none": the label has no more values than there are
    routes."""
    return str(getattr(scope.get("route"), "path", "none"))


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path if path.isprintable() else repr(path)


def _finish(record: RequestRecord) -> str | None:
    """Returns how the request's sequences ended, each way once; None if none did."""
    return ",".join(dict.fromkeys(record.finish_reasons.values())) or None


def _fields(scope: Scope, timings: Mapping[str, float | int | None] | None) -> dict[str, str | float | int | None]:
    """Returns what the log says of a request beside its line: those that are known."""
    record = record_of(scope)
    fields: dict[str, str | float | int | None] = {
        "id": record.request_id,
        "key": record.key.name or None,
        "peer": scope["client"][0] if scope["client"] else None,
        "model": record.model,
        "error": record.error_code or record.broken_by,
        "client": "left" if record.client_left else None,
        "finish": _finish(record),
    }
    if timings is not None:
        fields |= {name: timings.get(name) for name in (*_LOGGED, *_LOGGED_AT_THE_END)}
        if timings["itl_ms"] is None:
            fields |= dict.fromkeys(_LOGGED_AT_THE_END)
    return {name: value for name, value in fields.items() if value is not None}
