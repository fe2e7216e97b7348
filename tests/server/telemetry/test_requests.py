"""What is told of requests: spans and metrics."""

from itertools import pairwise
from typing import Any, ClassVar

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.metrics.export import HistogramDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from engine.core.errors import EngineUnavailableError, OverloadedError
from engine.core.stats import RequestTimings
from server.app import generation_routes
from server.core.request_record import RequestRecord
from server.core.timings import PhaseReport, TokenCounts
from server.routes.prefill import router as prefill_router
from server.telemetry.attributes import OPERATIONS
from tests.server.live_server import LiveServer, live_server
from tests.server.telemetry.told import PARENT, Attributes, Told, scope_of


def attributes_of(span: ReadableSpan | HistogramDataPoint) -> Attributes:
    return dict(span.attributes or {})


class TestSpans:
    @pytest.mark.parametrize(
        ("ask", "operation"),
        [
            ("complete", "text_completion"),
            ("chat", "chat"),
            ("respond", "chat"),
            ("message", "chat"),
            ("ollama", "text_completion"),
        ],
    )
    def test_a_request_is_one_span_with_its_phases(
        self, server: LiveServer, told: Told, ask: str, operation: str
    ) -> None:
        answer = getattr(server, ask)("Hi").json()
        server.wait_until_idle()
        root = told.spans.pop(f"{operation} fake")
        assert root.kind is SpanKind.SERVER and root.status.status_code is StatusCode.UNSET
        assert attributes_of(root).get("gen_ai.response.id") == answer.get("id")
        children = [told.spans[name] for name in ("queue", "prefill", "decode")]
        assert len(told.spans) == 4
        assert root.context is not None
        assert {child.parent.span_id for child in children if child.parent} == {root.context.span_id}
        assert children[0].start_time == root.start_time
        for earlier, later in pairwise(children):
            assert earlier.end_time == later.start_time

    def test_its_attributes_are_those_of_the_conventions(self, server: LiveServer, told: Told) -> None:
        body = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2}
        server.chat("Hello", {"X-Request-Id": "mine"}, **body)
        server.wait_until_idle()
        assert attributes_of(told.root) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "twostep",
            "gen_ai.request.model": "fake",
            "gen_ai.response.model": "fake",
            "server.address": "127.0.0.1",
            "server.port": server.port,
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.response.id": "chatcmpl-mine",
            "gen_ai.response.finish_reasons": ("length", "length"),
            "gen_ai.usage.input_tokens": len(server.engine.requests[-1].prompt_token_ids),
            "gen_ai.usage.output_tokens": 6,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "twostep.request_id": "mine",
            "twostep.preemptions": 0,
        }
        assert attributes_of(told.spans["prefill"]) == {"twostep.prefill_chunks": 2}

    @pytest.mark.parametrize(
        ("refusal", "status", "code", "is_failure"),
        [
            (OverloadedError("Full.", retry_after_s=1.0), 429, "slow_down", False),
            (EngineUnavailableError("It is dead."), 503, "server_is_overloaded", True),
            (ZeroDivisionError("a secret"), 500, "internal_error", True),
        ],
    )
    def test_a_refusal_has_its_error(
        self, server: LiveServer, told: Told, refusal: Any, status: int, code: str, is_failure: bool
    ) -> None:
        server.engine.refusal = refusal
        assert server.complete("Hi").status_code == status
        server.wait_until_idle()
        facts = {"error.type": code, "http.response.status_code": status}
        assert facts.items() <= attributes_of(told.root).items() and len(told.spans) == 1
        assert told.root.status.status_code is (StatusCode.ERROR if is_failure else StatusCode.UNSET)
        assert told.root.status.description is None and not told.root.events
        assert "gen_ai.response.id" not in attributes_of(told.root)

    def test_what_is_refused_before_it_is_read_is_told_too(self, server: LiveServer, told: Told) -> None:
        server.engine.is_full = True
        assert server.complete("Hi", {"traceparent": PARENT}).status_code == 429
        assert told.root.name == "text_completion" and told.root.parent is not None
        assert attributes_of(told.root)["error.type"] == "slow_down"

    def test_a_name_that_is_not_served_is_not_told(self, server: LiveServer, told: Told) -> None:
        assert server.complete("Hi", model="a secret").status_code == 404
        server.wait_until_idle()
        assert told.root.name == "text_completion" and "gen_ai.request.model" not in attributes_of(told.root)

    def test_a_stream_that_breaks_is_a_failure(self, server: LiveServer, told: Told) -> None:
        server.engine.fail_at = 2
        assert server.complete("Hi", stream=True).status_code == 200
        server.wait_until_idle()
        assert attributes_of(told.root)["error.type"] == "internal_error"
        assert told.root.status.status_code is StatusCode.ERROR
        assert told.spans["decode"].end_time == told.root.end_time

    def test_an_answer_that_fails_has_no_id(self, server: LiveServer, told: Told) -> None:
        server.engine.fail_at = 2
        assert server.complete("Hi").status_code == 500
        server.wait_until_idle()
        attributes = attributes_of(told.root)
        assert attributes["gen_ai.usage.output_tokens"] == 2 and "gen_ai.response.id" not in attributes

    def test_a_client_that_leaves_ends_decode(self, server: LiveServer, told: Told) -> None:
        server.engine.hold_at = 3
        with server.connect() as connection:
            connection.sendall(server.request_bytes("/v1/completions", {"prompt": "Hi", "stream": True}))
            server.wait_until(lambda: server.engine.num_holding == 1)
        server.wait_until_idle()
        server.wait_until(lambda: bool(told.spans))
        assert attributes_of(told.root)["error.type"] == "client_left"
        assert told.root.status.status_code is StatusCode.UNSET
        assert told.spans["decode"].end_time == told.root.end_time

    def test_one_token_is_not_decoded(self, server: LiveServer, told: Told) -> None:
        server.complete("Hi", max_tokens=1)
        server.wait_until_idle()
        assert told.spans.keys() == {"text_completion fake", "queue", "prefill"}

    def test_other_endpoints_have_none(self, server: LiveServer, told: Told) -> None:
        server.client.get("/v1/models", headers={"traceparent": PARENT})
        server.client.get("/v1/completions")
        server.post_json("/tokenize", {"prompt": "Hi"})
        server.wait_until_idle()
        assert told.spans == {} and told.points() == {}

    def test_fastapi_s_own_are_off(self, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        """They would tell the texts of errors, wherever something else in the process has set a provider up."""
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(told.exporter))
        monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
        with live_server() as server:
            assert server.complete("Hi").status_code == 200
            server.wait_until_idle()
        assert told.spans == {}

    def test_every_endpoint_that_generates_has_an_operation(self) -> None:
        assert OPERATIONS.keys() == {*generation_routes(), *(route.path for route in prefill_router.routes)}  # type: ignore[attr-defined]


class TestPhases:
    def test_times_are_those_of_the_report(self, told: Told) -> None:
        timings = RequestTimings(
            queue_s=1.0, remote_prefill_s=2.0, prefill_s=4.0, inter_token_s=(8.0,), prefill_chunks=3, preemptions=1
        )
        report = PhaseReport.of([timings], TokenCounts(prompt=5, cached=2, output=2))
        record = RequestRecord("mine", arrival_s=0.0, status=200, model="m", finish_reasons={0: "stop"})
        told.telemetry.on_request(scope_of(record), report, elapsed_s=16.0)
        begin = told.root.start_time or 0
        assert {name: lasts(span, begin) for name, span in told.spans.items()} == {
            "text_completion m": (0.0, 16.0),
            "remote_prefill": (0.0, 2.0),
            "queue": (2.0, 3.0),
            "prefill": (3.0, 7.0),
            "decode": (7.0, 15.0),
        }
        assert attributes_of(told.root)["twostep.preemptions"] == 1
        points = told.points()
        assert {name: point.sum for name, point in points.items()} == {
            "request.duration": 16.0,
            "time_to_first_token": 7.0,
            "time_per_output_token": 8.0,
        }

    def test_an_answer_of_which_some_is_missing_decodes_to_its_end(self, told: Told) -> None:
        timings = RequestTimings(queue_s=1.0, prefill_s=2.0, inter_token_s=(4.0,))
        report = PhaseReport.of([timings], TokenCounts(prompt=5, cached=2, output=3))
        record = RequestRecord("mine", 0.0, status=200, client_left=True, finish_reasons={0: "stop"})
        told.telemetry.on_request(scope_of(record), report, elapsed_s=16.0)
        assert lasts(told.spans["decode"], told.root.start_time or 0) == (3.0, 16.0)


def lasts(span: ReadableSpan, begin_ns: int) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return (span.start_time - begin_ns) / 1e9, (span.end_time - begin_ns) / 1e9


class TestMetrics:
    BOUNDS: ClassVar = {
        "request.duration": (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
        "time_to_first_token": (
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
            *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        ),
        "time_per_output_token": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    }

    def test_an_answer_is_measured_within_the_bounds_of_the_conventions(self, server: LiveServer, told: Told) -> None:
        server.chat("Hi", max_tokens=3)
        server.wait_until_idle()
        points = told.points()
        assert {name: tuple(point.explicit_bounds) for name, point in points.items()} == self.BOUNDS
        names = ("operation.name", "provider.name", "request.model", "response.model")
        known = {*(f"gen_ai.{name}" for name in names), "server.address", "server.port"}
        assert all(attributes_of(point).keys() == known for point in points.values())
        assert points["time_to_first_token"].sum == pytest.approx(0.003)  # as the fake engine's times are
        assert points["time_per_output_token"].sum == pytest.approx(0.0005)
        assert told.root.context is not None
        assert [each.trace_id for each in points["request.duration"].exemplars] == [told.root.context.trace_id]

    def test_of_what_failed_the_duration_alone_is_measured(self, server: LiveServer, told: Told) -> None:
        server.engine.fail_at = 2
        server.complete("Hi", stream=True)
        server.wait_until_idle()
        points = told.points()
        assert points.keys() == {"request.duration"}
        assert attributes_of(points["request.duration"])["error.type"] == "internal_error"

    def test_an_embedding_has_no_first_token(self, server: LiveServer, told: Told) -> None:
        assert server.post_json("/v1/embeddings", {"input": "Hi"}).status_code == 200
        server.wait_until_idle()
        assert told.points().keys() == {"request.duration"}
        assert told.spans.keys() == {"embeddings fake", "queue", "prefill"}
