"""Exports by OTLP over HTTP, in protobuf. The SDK reads the OTEL_* variables: where to, how often, which requests."""

import logging
import time

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from server.core.version import VERSION
from server.telemetry.exporting import ExportingTelemetry

logger = logging.getLogger("twostep.telemetry")

_LOG_EVERY_S = 60.0


def otlp_telemetry(traces: bool, metrics: bool) -> ExportingTelemetry:
    """Returns telemetry that exports spans, measurements or both. Starts their threads."""
    limit_export_log()
    resource = Resource.create({"service.name": "twostep", "service.version": VERSION})
    resource = resource.merge(OTELResourceDetector().detect())  # what the environment says goes before that
    tracing = metering = None
    if traces:
        tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracing.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if metrics:
        readers = [PeriodicExportingMetricReader(OTLPMetricExporter())]
        metering = MeterProvider(readers, resource, shutdown_on_exit=False)
    return ExportingTelemetry(tracing, metering)


def limit_export_log() -> None:
    """Sends what the SDK logs through one `ExportLog`: for as long as a collector is away it would log each try."""
    sdk = logging.getLogger("opentelemetry")
    sdk.propagate = False
    if not any(isinstance(handler, ExportLog) for handler in sdk.handlers):
        sdk.addHandler(ExportLog(logging.WARNING))


class ExportLog(logging.Handler):
    """Passes on one warning a minute, and tells how many it left out."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._again_s = 0.0
        self._num_left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s < self._again_s:
            self._num_left_out += 1
            return
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        more = f" ({self._num_left_out} messages since the last one left out)" if self._num_left_out else ""
        self._again_s, self._num_left_out = now_s + _LOG_EVERY_S, 0
        logger.warning("%s%s%s", record.getMessage(), cause, more)
