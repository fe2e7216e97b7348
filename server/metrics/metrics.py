"""The app's Prometheus metrics: one registry, fed by the engine, as its observer, and by the middlewares."""

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from engine.core.batch import Phase
from engine.core.config import EngineInfo
from engine.core.machine import Bound
from engine.core.request import FinishReason
from engine.core.stats import QueueStats, RequestTimings, StepShare, StepStats
from server.core.timings import TokenCounts
from server.metrics.aliases import Exposition
from server.metrics.buffered_observer import BufferedObserver
from server.metrics.engine_collector import EngineCollector
from server.metrics.key_filter import KeyFilter
from server.metrics.recent_stats import RecentStats
from server.metrics.timeline import Timeline
from server.protocol.stats import Stats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# Fine at both ends: small models answer within milliseconds, queues last for minutes.
_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_GAP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
          0.5, 1, 2, 5, 10, 30, 60, 120)  # fmt: skip
_HTTP_S = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 10, 30, 60, 300)  # few: there is one series per route and method
_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 5)
_TOKENS = tuple(2**power for power in range(15))


class Metrics:
    """Implements `EngineObserver`. Metric names and labels are those of the table in docs/operations.md; every label
    has a bounded set of values.

    Counters of tokens and histograms per token advance when the engine's outputs deliver tokens; gauges, and counters
    that the engine keeps itself, are read from its newest step when Prometheus scrapes.
    """

    def __init__(self, model_name: str, with_vllm_names: bool) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._registry.register(self._engine)
        self._exposition = Exposition(self._registry, model_name if with_vllm_names else None)
        self._make_request_metrics()
        self._make_step_metrics()
        self._make_role_metrics()
        self._make_http_metrics()
        self._recent = RecentStats()
        self._timeline = Timeline()
        self._steps = BufferedObserver(self._observe_step)
        self._tokens = BufferedObserver(self._observe_tokens)

    def render(self, key: str | None = None) -> bytes:
        """Returns all metrics in Prometheus' text exposition format; with `key`, of those by API key its own alone."""
        self._flush()
        return generate_latest(self._exposition if key is None else KeyFilter(self._exposition, key))

    def recent(self) -> Stats:
        """Returns totals, and the times of recent requests and steps."""
        self._flush()
        return self._recent.summary(self._engine.prefix_cache)

    def timeline(self, cursor: int, key: str, tenant: str) -> dict[str, Any]:
        """Returns what is new since the cursor: see `Timeline.since`."""
        self._flush()
        return self._timeline.since(cursor, key, tenant)

    def on_engine_info(self, info: EngineInfo) -> None:
        """Takes what the engine reports when the model is loaded."""
        self._engine.info = info

    def watch_queue(self, queue_stats: Callable[[], QueueStats]) -> None:
        """Reads the admission queue with `queue_stats`, whenever Prometheus scrapes."""
        self._engine.queue_stats = queue_stats

    def watch_answers(self, num_reserved: Callable[[], int]) -> None:
        """Reads the memory reserved for answers with `num_reserved`, whenever Prometheus scrapes."""
        self._engine.answer_bytes = num_reserved

    def on_step(self, stats: StepStats, shares: Sequence[StepShare] = ()) -> None:
        self._engine.stats = stats
        self._steps.add((stats, shares))

    def on_restart(self) -> None:
        self._engine.on_restart()

    def on_prompt(self, timings: RequestTimings, num_tokens: int) -> None:
        self._queue_time.observe(timings.queue_s)
        self._prefill_time.observe(timings.prefill_s)
        self._prompt_tokens.inc(num_tokens)
        self._recent.add_prompt(num_tokens)

    def on_remote_prefill(self, seconds: float, num_tokens: int | None) -> None:
        self._remote_prefills.labels("failed" if num_tokens is None else "stored").inc()
        self._remote_prefill_time.observe(seconds)
        self._remote_prefill_tokens.inc(num_tokens or 0)

    def on_lost_tokens(self, num_tokens: int) -> None:
        self._lost_tokens.inc(num_tokens)

    def on_handed_over(self, num_tokens: int) -> None:
        """Counts the tokens of a prompt whose blocks were stored for another server."""
        self._handed_over_tokens.inc(num_tokens)

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._timeline.add_first_token(ttft_s, time.monotonic())

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self._tokens.add((num_tokens, gap_s, time.monotonic()))

    def on_finish(self, reason: FinishReason, timings: RequestTimings | None) -> None:
        self._requests.labels(reason.value).inc()
        self._recent.add_end(timings)
        if timings is None:
            return
        self._e2e.observe(timings.e2e_s)
        self._decode_time.observe(timings.decode_s)
        if timings.tpot_s is not None:
            self._per_token.observe(timings.tpot_s)

    def on_rejection(self, reason: str) -> None:
        """Counts a POST request that was refused; `reason` is the error's code."""
        self._rejections.labels(reason).inc()

    def on_broken_stream(self, reason: str) -> None:
        """Counts a stream that failed after it had begun; `reason` is the error's code."""
        self._broken_streams.labels(reason).inc()

    def on_refusal_answer(self, verdict: str) -> None:
        """Counts an error response by its `error_rate_limit.Verdict`."""
        self._refusal_answers.labels(verdict).inc()

    def on_key_request(self, key: str, counts: TokenCounts | None, error_code: str | None) -> None:
        """Counts a POST request with this API key, at its end. `counts` is None if it got no token; `error_code` is
        None unless it was refused."""
        self._key_requests.labels(key).inc()
        if counts is not None:
            self._key_tokens.labels(key, "prompt").inc(counts.prompt)
            self._key_tokens.labels(key, "generated").inc(counts.output)
        if error_code is not None:
            self._key_rejections.labels(key, error_code).inc()

    def on_answer(self, key: str, arrival_s: float, body: dict[str, Any]) -> None:
        """Takes a request that got a token, at its end, with what is told of it to its API key."""
        self._timeline.add_request(key, arrival_s, body)

    def on_promise(self, promise: str, outcome: str) -> None:
        """Counts a promise, ttft or itl, that a request asked for, by how it ended: kept, missed or refused."""
        self._promises.labels(promise, outcome).inc()

    def on_http_request(self, handler: str, method: str, status: int, duration_s: float) -> None:
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_duration.labels(handler, method).observe(duration_s)

    def _flush(self) -> None:
        self._steps.flush()
        self._tokens.flush()

    def _observe_step(self, step: tuple[StepStats, Sequence[StepShare]]) -> None:
        stats, shares = step
        if stats.phase is None:
            return
        self._recent.add_step(stats)
        self._timeline.add_step(stats, shares)
        self._step_duration[stats.phase].observe(stats.duration_s)
        self._step_tokens[stats.phase].observe(stats.num_tokens)
        num_computed = stats.num_tokens if stats.phase is Phase.PREFILL else 0
        self._iteration_tokens.observe(num_computed + stats.num_generated)
        self._drafting.inc(stats.drafting_s)
        if stats.certain_floor_s and stats.bound:
            self._step_floor[stats.phase, stats.bound].inc(stats.certain_floor_s)
        if stats.predicted_s and stats.model_s:
            self._step_prediction[stats.phase].observe(stats.model_s / stats.predicted_s)

    def _observe_tokens(self, tokens: tuple[int, float | None, float]) -> None:
        num_tokens, gap_s, time_s = tokens
        self._timeline.add_tokens(num_tokens, gap_s, time_s)
        self._generation_tokens.inc(num_tokens)
        gaps_s = ([] if gap_s is None else [gap_s]) + [0.0] * (num_tokens - 1)  # tokens of one step come together
        self._recent.add_tokens(num_tokens, gaps_s)
        for each_s in gaps_s:
            self._inter_token.observe(each_s)

    def _make_request_metrics(self) -> None:
        self._ttft = self._histogram("time_to_first_token", "Arrival to first token, queue included.", _LATENCY_S)
        self._inter_token = self._histogram("inter_token_latency", "Gaps between consecutive tokens.", _GAP_S)
        self._per_token = self._histogram("time_per_output_token", "Mean gap between a request's tokens.", _GAP_S)
        self._e2e = self._histogram("e2e_request_latency", "Arrival to last token.", _LATENCY_S)
        self._queue_time = self._histogram("request_queue_time", "Arrival to first scheduled.", _LATENCY_S)
        self._prefill_time = self._histogram("request_prefill_time", "First scheduled to first token.", _LATENCY_S)
        self._decode_time = self._histogram("request_decode_time", "First to last token.", _LATENCY_S)
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts that were read, once for all answers to one."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated and delivered.")
        self._requests = self._counter(
            "requests", "Sequences that ended, by how: one for each answer.", "finish_reason"
        )
        self._rejections = self._counter("rejections", "POST requests that were refused, by error code.", "reason")
        self._promises = self._counter(
            "slo_requests", "Requests that asked for a promise, by what became of it.", "slo", "outcome"
        )
        self._broken_streams = self._counter(
            "broken_streams", "Streams that failed after they had begun, by error code.", "reason"
        )
        self._refusal_answers = self._counter(
            "refusal_answers", "Error responses under the error rate limit, by what became of them.", "how"
        )
        self._key_requests = self._counter("key_requests", "POST requests that ended, by API key.", "key")
        self._key_tokens = self._counter("key_tokens", "Tokens of requests that ended, by API key.", "key", "kind")
        self._key_rejections = self._counter("key_rejections", "Refused requests, by API key.", "key", "reason")
        for reason in FinishReason:
            self._requests.labels(reason.value)

    def _make_step_metrics(self) -> None:
        self._drafting = self._counter("drafting_seconds", "The part of decode steps in which the draft model runs.")
        duration = self._histogram("step_duration", "Duration of an engine step.", _GAP_S, "phase")
        tokens = self._step_histogram("tokens", "Tokens of an engine step.", _TOKENS)
        self._iteration_tokens = Histogram(
            "twostep_iteration_tokens",
            "Tokens of prompts that an engine step computed, and tokens that it generated.",
            buckets=_TOKENS,
            registry=self._registry,
        )
        ratio = self._step_histogram("prediction_ratio", "Time of an engine step over what was predicted.", _RATIO)
        self._step_duration = {phase: duration.labels(phase.value) for phase in Phase}
        self._step_tokens = {phase: tokens.labels(phase.value) for phase in Phase}
        self._step_prediction = {phase: ratio.labels(phase.value) for phase in Phase}
        floor = self._counter("step_floor_seconds", "Time of engine steps at the machine's ceilings.", "phase", "bound")
        self._step_floor = {key: floor.labels(*key) for key in product(Phase, Bound)}

    def _make_role_metrics(self) -> None:
        text = "Prompts that prefill servers were asked for, by what came of it."
        self._remote_prefills = self._counter("remote_prefills", text, "result")
        for result in ("stored", "failed"):
            self._remote_prefills.labels(result)
        text = "Time in which prefill servers were asked for a prompt."
        self._remote_prefill_time = self._histogram("remote_prefill_time", text, _LATENCY_S)
        self._remote_prefill_tokens = self._counter("remote_prefill_tokens", "Tokens that prefill servers stored.")
        self._lost_tokens = self._counter("remote_prefill_lost_tokens", "Of these, those that were not found.")
        self._handed_over_tokens = self._counter("handed_over_tokens", "Tokens stored for decode servers.")

    def _make_http_metrics(self) -> None:
        self._http_requests = self._counter("http_requests", "HTTP requests.", "handler", "method", "status")
        self._http_duration = self._histogram(
            "http_request_duration", "HTTP request to the end of its response.", _HTTP_S, "handler", "method"
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"twostep_{name}_seconds", text, labels, buckets=buckets, registry=self._registry)

    def _step_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"twostep_step_{name}", text, ("phase",), buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"twostep_{name}_total", text, labels, registry=self._registry)
