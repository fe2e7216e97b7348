"""What spans and metrics say of a request, by OpenTelemetry's conventions for generative AI (`gen_ai.*`) and HTTP.

Nothing of this has a prompt, an answer, or the text of an error, which may quote them. Plain values: no OpenTelemetry.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from starlette.types import Scope

from server.core.request_record import RequestRecord, record_of
from server.core.timings import PhaseReport

Value = str | int | float | list[str]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a generating endpoint does."""

    name: str
    id_prefix: str | None = None
    """How the ids of its responses begin, before the request's; None if they have no ids."""


OPERATIONS: Mapping[str, Operation] = {
    "/v1/completions": Operation("text_completion", "cmpl-"),
    "/v1/chat/completions": Operation("chat", "chatcmpl-"),
    "/v1/responses": Operation("chat", "resp_"),
    "/v1/messages": Operation("chat", "msg_"),
    "/v1/embeddings": Operation("embeddings"),
    "/v1/prefill": Operation("prefill"),
    "/api/chat": Operation("chat"),
    "/api/generate": Operation("text_completion"),
    "/api/embed": Operation("embeddings"),
    "/api/embeddings": Operation("embeddings"),
}
"""The endpoints that are told of, by the paths of their routes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, in seconds after its arrival."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


def operation_of(scope: Scope) -> Operation | None:
    """Returns what the request asks for; None if nothing is told of it."""
    return OPERATIONS.get(getattr(scope.get("route"), "path", "")) if scope["method"] == "POST" else None


def error_of(record: RequestRecord) -> str | None:
    """Returns what kept the request from a whole answer: the error's code, or that its client left."""
    return record.error_code or record.broken_by or ("client_left" if record.client_left else None)


def metric_attributes(scope: Scope, operation: Operation) -> dict[str, Value]:
    """Returns the attributes that spans and metrics share. Each has a bounded number of values."""
    record = record_of(scope)
    address, port = scope.get("server") or (None, None)
    return _known(
        {
            "gen_ai.operation.name": operation.name,
            "gen_ai.provider.name": "twostep",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "server.address": address,
            "server.port": port,
            "error.type": error_of(record),
        }
    )


def span_attributes(scope: Scope, operation: Operation, report: PhaseReport | None) -> dict[str, Value]:
    """Returns what a span has beside the attributes of metrics."""
    record = record_of(scope)
    attributes: dict[str, Value | None] = {
        "http.request.method": scope["method"],
        "http.route": scope["route"].path,
        "http.response.status_code": record.status or None,
        "gen_ai.response.finish_reasons": [reason for _, reason in sorted(record.finish_reasons.items())] or None,
        "twostep.request_id": record.request_id,
        "twostep.key": record.key.name or None,
    }
    if record.params is not None:
        attributes |= {
            "gen_ai.request.max_tokens": record.params.max_tokens,
            "gen_ai.request.temperature": record.params.temperature,
            "gen_ai.request.top_p": record.params.top_p,
        }
    if report is not None:
        has_id = operation.id_prefix is not None and record.error_code is None
        attributes |= {
            "gen_ai.response.id": f"{operation.id_prefix}{record.request_id}" if has_id else None,
            "gen_ai.usage.input_tokens": report.counts.prompt,
            "gen_ai.usage.output_tokens": report.counts.output,
            "gen_ai.usage.cache_read.input_tokens": report.counts.cached,
            "twostep.preemptions": report.timings.preemptions,
        }
    return _known(attributes)


def phases_of(record: RequestRecord, report: PhaseReport, elapsed_s: float) -> Iterator[Phase]:
    """Yields the phases of a request that got a token, in their order. Their lengths are measured. When a prefill
    server was asked is not: that comes first here, and what passed before it counts as queue, as in `timings`."""
    timings = report.timings
    remote_s = timings.remote_prefill_s or 0.0
    scheduled_s = remote_s + timings.queue_s
    if timings.remote_prefill_s is not None:
        yield Phase("remote_prefill", 0.0, remote_s)
    yield Phase("queue", remote_s, scheduled_s)
    yield Phase("prefill", scheduled_s, timings.ttft_s, {"twostep.prefill_chunks": timings.prefill_chunks})
    if report.counts.output > 1:
        is_whole = bool(record.finish_reasons) and error_of(record) is None
        yield Phase("decode", timings.ttft_s, timings.ttft_s + report.decode_s if is_whole else elapsed_s)


def _known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}
