"""Spans and metrics of requests, made when a request has ended and exported by threads of OpenTelemetry's SDK."""

import time
from collections.abc import Mapping
from threading import Thread

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from server.core.request_record import RequestRecord, record_of
from server.core.timings import PhaseReport
from server.core.version import VERSION
from server.telemetry.attributes import (
    Operation,
    Value,
    error_of,
    metric_attributes,
    operation_of,
    phases_of,
    span_attributes,
)
from server.telemetry.telemetry import client_trace

CLOSE_S = 3.0

# The bounds that the conventions name.
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class ExportingTelemetry:
    """Implements `Telemetry`. A request costs some spans and measurements, which are handed to threads: nothing here
    waits for them."""

    def __init__(self, traces: TracerProvider | None, metrics: MeterProvider | None) -> None:
        """Either may be None, for none of its kind."""
        self._providers = [each for each in (traces, metrics) if each is not None]
        self._tracer = None if traces is None else traces.get_tracer("twostep", VERSION)
        self._metrics = None if metrics is None else RequestMetrics(metrics)
        self._propagator = TraceContextTextMapPropagator()

    def on_request(self, scope: Scope, report: PhaseReport | None, elapsed_s: float) -> Mapping[str, str]:
        operation = operation_of(scope)
        if operation is None:
            return client_trace(scope)
        attributes = metric_attributes(scope, operation)
        span = self._trace(scope, operation, attributes, report, elapsed_s)
        if self._metrics is not None:
            self._metrics.record(attributes, report, elapsed_s, None if span is None else set_span_in_context(span))
        return client_trace(scope) if span is None else _ids_of(span)

    def close(self) -> None:
        threads = [Thread(target=each.shutdown, daemon=True) for each in self._providers]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _trace(
        self,
        scope: Scope,
        operation: Operation,
        attributes: Mapping[str, Value],
        report: PhaseReport | None,
        elapsed_s: float,
    ) -> Span | None:
        """Makes the request's span and those of its phases. Returns the former."""
        if self._tracer is None:
            return None
        record = record_of(scope)
        end_ns = time.time_ns()
        arrival_ns = end_ns - _ns(elapsed_s)
        span = self._tracer.start_span(
            f"{operation.name} {record.model}" if record.model else operation.name,
            self._parent_of(scope),
            SpanKind.SERVER,
            {**attributes, **span_attributes(scope, operation, report)},
            start_time=arrival_ns,
        )
        if span.is_recording() and report is not None:
            inside = set_span_in_context(span)
            for phase in phases_of(record, report, elapsed_s):
                start_ns = arrival_ns + _ns(phase.start_s)
                child = self._tracer.start_span(phase.name, inside, attributes=phase.attributes, start_time=start_ns)
                child.end(arrival_ns + _ns(phase.end_s))
        if _is_failure(record):
            span.set_status(StatusCode.ERROR)
        span.end(end_ns)
        return span

    def _parent_of(self, scope: Scope) -> Context:
        headers = Headers(scope=scope)
        names = ("traceparent", "tracestate")
        return self._propagator.extract({name: headers.getlist(name) for name in names if name in headers}, Context())


class RequestMetrics:
    """The metrics that the conventions ask of a model's server."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter("twostep", VERSION)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            name = f"gen_ai.server.{name}"
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

        self._duration = histogram("request.duration", "Arrival to the end of the response.", _DURATION_S)
        self._first_token = histogram("time_to_first_token", "Arrival to first token.", _FIRST_TOKEN_S)
        self._per_token = histogram("time_per_output_token", "Mean gap between tokens.", _PER_TOKEN_S)

    def record(
        self, attributes: Mapping[str, Value], report: PhaseReport | None, elapsed_s: float, context: Context | None
    ) -> None:
        """Measures a request. Times of tokens are those of answers that were given whole."""
        self._duration.record(elapsed_s, attributes, context)
        if report is None or report.counts.output == 0 or "error.type" in attributes:
            return
        self._first_token.record(report.timings.ttft_s, attributes, context)
        if report.timings.tpot_s is not None:
            self._per_token.record(report.timings.tpot_s, attributes, context)


def _is_failure(record: RequestRecord) -> bool:
    """Tells whether the server is at fault, as HTTP's conventions have it: not for what a client did wrong."""
    return error_of(record) is not None and (record.status >= 500 or record.broken_by is not None)


def _ids_of(span: Span) -> dict[str, str]:
    context = span.get_span_context()
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
