"""The client's trace: whose child a request's span is, and what log lines and other servers are told of it."""

import json
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.trace.propagation import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.host.log_format import JsonFormatter
from server.core.request_record import RequestRecord
from server.telemetry.telemetry import NullTelemetry, client_trace
from tests.server.live_server import LiveServer, live_server
from tests.server.telemetry.told import PARENT, SPAN_ID, TRACE_ID, Told, in_memory, scope_of


class TestTraceContext:
    def test_the_parent_is_the_client_s(self, server: LiveServer, told: Told) -> None:
        server.complete("Hi", {"TraceParent": PARENT, "tracestate": "a=1,b=2"})
        server.wait_until_idle()
        parent, context = told.root.parent, told.root.context
        assert parent is not None and context is not None and parent.is_remote
        assert (format_trace_id(context.trace_id), format_span_id(parent.span_id)) == (TRACE_ID, SPAN_ID)
        assert dict(context.trace_state) == {"a": "1", "b": "2"}

    def test_a_client_that_samples_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = in_memory(sampler=ParentBased(ALWAYS_OFF))
        record = RequestRecord("mine", arrival_s=0.0)
        for flags in ("00", "01"):
            told.telemetry.on_request(scope_of(record, (b"traceparent", f"{PARENT[:-2]}{flags}".encode())), None, 1.0)
        told.telemetry.on_request(scope_of(record), None, 1.0)
        assert [span.parent is not None for span in told.exporter.get_finished_spans()] == [True]

    @pytest.mark.parametrize(
        ("headers", "handed_on"),
        [
            ([("traceparent", PARENT)], {"traceparent": PARENT}),
            (
                [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")],
                {"traceparent": PARENT, "tracestate": "a=1,b=2"},
            ),
            ([("traceparent", PARENT), ("tracestate", "x" * 513)], {"traceparent": PARENT}),
            ([("traceparent", PARENT), ("tracestate", "é")], {"traceparent": PARENT}),
            ([("traceparent", "nonsense"), ("tracestate", "a=1")], {}),
            ([("tracestate", "a=1"), ("authorization", "Bearer secret")], {}),
        ],
    )
    def test_servers_that_work_for_a_request_are_told_its_trace(
        self, server: LiveServer, headers: list[tuple[str, str]], handed_on: dict[str, str]
    ) -> None:
        body = {"prompt": "Hi", "max_tokens": 1}
        sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        assert server.client.post("/v1/completions", json=body, headers=sent).status_code == 200
        assert server.engine.requests[-1].trace_headers == handed_on

    @pytest.mark.parametrize(
        "header",
        [
            PARENT,
            f"00-{TRACE_ID}-{SPAN_ID}-00",
            f"cc-{TRACE_ID}-{SPAN_ID}-01",
            f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes",
            f"00-{TRACE_ID}-{SPAN_ID}-01-what-comes",
            f"ff-{TRACE_ID}-{SPAN_ID}-01",
            f"00-{'0' * 32}-{SPAN_ID}-01",
            f"00-{TRACE_ID}-{'0' * 16}-01",
            f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
            f"00-{TRACE_ID}-{SPAN_ID}",
            f"00-{TRACE_ID}x-{SPAN_ID}-01",
            f"00-{TRACE_ID}-{SPAN_ID}-0g",
            "",
            "nonsense",
        ],
    )
    def test_a_header_is_read_as_the_sdk_reads_it(self, header: str) -> None:
        scope = scope_of(RequestRecord("mine", arrival_s=0.0), (b"traceparent", header.encode()))
        context = get_current_span(
            TraceContextTextMapPropagator().extract({"traceparent": [header]})
        ).get_span_context()
        assert client_trace(scope) == ({"trace_id": format_trace_id(context.trace_id)} if context.is_valid else {})


class TestLogs:
    def test_lines_name_the_span(self, server: LiveServer, told: Told, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", logger="twostep.access"):
            server.complete("Hi")
            server.wait_until_idle()
        line = access_line(caplog)
        context = told.root.context
        assert context is not None
        assert line["trace_id"] == format_trace_id(context.trace_id)
        assert line["span_id"] == format_span_id(context.span_id)

    @pytest.mark.parametrize("headers", [{}, {"traceparent": PARENT}, {"traceparent": "nonsense"}])
    def test_without_a_span_they_name_the_client_s_trace(
        self, caplog: pytest.LogCaptureFixture, headers: dict[str, str]
    ) -> None:
        with live_server() as server, caplog.at_level("INFO", logger="twostep.access"):
            assert isinstance(server.context.telemetry, NullTelemetry)
            server.complete("Hi", headers)
            server.wait_until_idle()
        line = access_line(caplog)
        assert "span_id" not in line
        assert line.get("trace_id") == (TRACE_ID if headers.get("traceparent") == PARENT else None)


def access_line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    [record] = [record for record in caplog.records if record.name == "twostep.access"]
    line = json.loads(JsonFormatter().format(record))
    assert isinstance(line, dict)
    return line
