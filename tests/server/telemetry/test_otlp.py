"""A server that exports to a collector over HTTP."""

import logging
import threading
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

from server.telemetry import exporting
from server.telemetry.exporting import ExportingTelemetry
from server.telemetry.otlp import ExportLog
from tests.server.live_server import live_server
from tests.server.telemetry.collector import Collector, collector, values

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT, ANSWER = "a secret to keep", "zyxwv"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Generator[Collector, None, None]:
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


def ask(**settings: Any) -> None:
    """Starts a server, asks it once, and ends it."""
    with live_server(otel=True, **settings) as server:
        server.engine.rule = lambda _, position: ord(ANSWER[position % len(ANSWER)])
        answer = server.chat(PROMPT, {"traceparent": PARENT, "tracestate": "vendor=1"}, max_tokens=5)
        assert answer.json()["choices"][0]["message"]["content"] == ANSWER
        server.wait_until_idle()


def test_spans_and_metrics_arrive_before_the_server_has_ended(receiver: Collector) -> None:
    ask()
    spans = receiver.spans
    assert spans.keys() == {"chat fake", "queue", "prefill", "decode"}
    root = spans.pop("chat fake")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert root.trace_state == "vendor=1" and root.kind == root.SPAN_KIND_SERVER
    assert {(each.trace_id, each.parent_span_id) for each in spans.values()} == {(root.trace_id, root.span_id)}
    assert values(root.attributes)["gen_ai.usage.output_tokens"] == 5  # type: ignore[arg-type]
    metrics = receiver.newest_metrics
    names = ("request.duration", "time_to_first_token", "time_per_output_token")
    assert metrics.keys() == {f"gen_ai.server.{name}" for name in names}
    for metric in metrics.values():
        [point] = metric.histogram.data_points
        assert (metric.unit, point.count) == ("s", 1)
        assert values(point.attributes)["gen_ai.request.model"] == "fake"  # type: ignore[arg-type]


def test_neither_prompt_nor_answer_is_exported(receiver: Collector) -> None:
    ask()
    assert len(receiver.bodies) == 2
    assert not any(text.encode() in body for body in receiver.bodies for text in (PROMPT, ANSWER))


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "twostep"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,team=a"}, "ours"),
    ],
)
def test_the_service_has_the_name_that_the_environment_gives(
    receiver: Collector, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    ask()
    resources = [receiver.traces[0].resource_spans[0].resource, receiver.metrics[0].resource_metrics[0].resource]
    assert [values(each.attributes)["service.name"] for each in resources] == [name] * 2  # type: ignore[arg-type]


def test_what_is_said_of_one_signal_goes_before_what_is_said_of_all(
    receiver: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    ask()
    assert receiver.traces and not receiver.metrics


@pytest.mark.parametrize(
    ("variable", "value", "has_traces", "has_metrics"),
    [
        ("OTEL_SDK_DISABLED", "true", False, False),
        ("OTEL_TRACES_SAMPLER", "always_off", False, True),
        ("OTEL_TRACES_EXPORTER", "none", False, True),
        ("OTEL_METRICS_EXPORTER", "none", True, False),
    ],
)
def test_the_environment_says_what_is_exported(
    receiver: Collector,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    has_traces: bool,
    has_metrics: bool,
) -> None:
    monkeypatch.setenv(variable, value)
    ask()
    assert (bool(receiver.traces), bool(receiver.metrics)) == (has_traces, has_metrics)


def test_a_collector_that_is_away_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collector() as gone:
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", gone.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    sdk = logging.getLogger("opentelemetry")
    monkeypatch.setattr(sdk, "handlers", [])  # whose minute has not begun
    ask()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "export" in warnings[0]


def test_the_end_waits_for_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    class Stuck:
        def get_tracer(self, *_: object) -> None:
            pass

        def shutdown(self) -> None:
            is_over.wait()

    monkeypatch.setattr(exporting, "CLOSE_S", 0.01)
    ExportingTelemetry(Stuck(), None).close()  # type: ignore[arg-type]
    assert not is_over.is_set()
    is_over.set()


def test_lines_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log, now_s = ExportLog(logging.WARNING), 1000.0
    monkeypatch.setattr("server.telemetry.otlp.time", SimpleNamespace(monotonic=lambda: now_s))
    for now_s in (1000.0, 1001.0, 1059.0, 1060.5, 1061.0):
        log.handle(logging.makeLogRecord({"msg": f"at {now_s}", "levelno": logging.WARNING}))
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["at 1000.0", "at 1060.5 (2 messages since the last one left out)"]
