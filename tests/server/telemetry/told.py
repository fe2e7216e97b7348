"""Telemetry in memory, and what it was told."""

from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.routing import Route

from server.core.request_record import RequestRecord, attach_record
from server.telemetry.exporting import ExportingTelemetry

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
Attributes = dict[str, Any]


@dataclass
class Told:
    """What telemetry in memory was told."""

    telemetry: ExportingTelemetry
    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """Spans by their names."""
        return {span.name: span for span in self.exporter.get_finished_spans()}

    @property
    def root(self) -> ReadableSpan:
        """The one span of a whole request."""
        [span] = [span for span in self.exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
        return span

    def points(self) -> dict[str, HistogramDataPoint]:
        """The one point of each metric, by its name behind gen_ai.server."""
        data = self.reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics if data and data.resource_metrics else ()
        return {metric.name.removeprefix("gen_ai.server."): _one_point(metric.data) for metric in metrics}


def _one_point(data: Any) -> HistogramDataPoint:
    [point] = data.data_points
    assert isinstance(point, HistogramDataPoint)
    return point


def in_memory(**options: Any) -> Told:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    traces = TracerProvider(shutdown_on_exit=False, **options)
    traces.add_span_processor(SimpleSpanProcessor(exporter))
    return Told(ExportingTelemetry(traces, MeterProvider([reader], shutdown_on_exit=False)), exporter, reader)


def scope_of(record: RequestRecord, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "route": Route("/v1/completions", lambda request: None),
        "headers": list(headers),
    }
    attach_record(scope, record)
    return scope
