"""A collector of OpenTelemetry's protocol over HTTP, in a thread: it keeps the requests that it gets, parsed."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    url: str
    bodies: list[bytes] = field(default_factory=list)
    traces: list[ExportTraceServiceRequest] = field(default_factory=list)
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)

    @property
    def spans(self) -> dict[str, Span]:
        """Spans by their names."""
        spans = [
            span
            for request in self.traces
            for of_resource in request.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]
        return {span.name: span for span in spans}

    @property
    def newest_metrics(self) -> dict[str, Metric]:
        """Metrics by their names, as they were exported last."""
        metrics = [
            metric
            for request in self.metrics
            for of_resource in request.resource_metrics
            for scope in of_resource.scope_metrics
            for metric in scope.metrics
        ]
        return {metric.name: metric for metric in metrics}


def values(attributes: list[KeyValue]) -> dict[str, object]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


@contextmanager
def collector() -> Generator[Collector, None, None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            running.bodies.append(body)
            if self.path == "/v1/traces":
                running.traces.append(ExportTraceServiceRequest.FromString(body))
            else:
                assert self.path == "/v1/metrics"
                running.metrics.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        running = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()
