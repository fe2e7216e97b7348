"""Metrics: names, types and labels as published, and counters that advance by exactly what happened."""

import re

import msgspec
import pytest

from engine.client.live_request import TokenClock
from engine.core.batch import Phase
from engine.core.machine import Bound
from engine.core.messages import FirstTokenInfo
from engine.core.request import FinishReason
from engine.core.stats import PoolStats, QueueStats, RequestTimings, StepStats
from server.core.timings import TokenCounts
from server.metrics.engine_collector import EngineCollector
from server.metrics.metrics import Metrics
from server.protocol.stats import PrefixCacheTotals
from tests.server.events import chunks_of
from tests.server.fake_engine import INFO
from tests.server.live_server import LiveServer, live_server
from tests.server.metrics.published_metrics import advance, parse

# Own name without prefix -> type, labels, aliases.
TABLE: dict[str, tuple[str, set[str], list[str]]] = {
    "requests_running": ("gauge", set(), ["vllm:num_requests_running"]),
    "requests_waiting": ("gauge", set(), ["vllm:num_requests_waiting"]),
    "waiting_tokens": ("gauge", set(), []),
    "predicted_wait_seconds": ("gauge", set(), []),
    "kv_cache_usage_ratio": ("gauge", set(), ["vllm:kv_cache_usage_perc"]),
    "kv_blocks": ("gauge", {"state"}, []),
    "engine_info": ("gauge", {"device", "dtype", "forward", "attention", "linear"}, []),
    "cache_config_info": ("gauge", {"block_size", "num_gpu_blocks"}, ["vllm:cache_config_info"]),
    "time_to_first_token_seconds": ("histogram", set(), ["vllm:time_to_first_token_seconds"]),
    "inter_token_latency_seconds": ("histogram", set(), ["vllm:inter_token_latency_seconds"]),
    "time_per_output_token_seconds": (
        "histogram",
        set(),
        ["vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"],
    ),
    "e2e_request_latency_seconds": ("histogram", set(), ["vllm:e2e_request_latency_seconds"]),
    "request_queue_time_seconds": ("histogram", set(), ["vllm:request_queue_time_seconds"]),
    "request_prefill_time_seconds": ("histogram", set(), ["vllm:request_prefill_time_seconds"]),
    "request_decode_time_seconds": ("histogram", set(), ["vllm:request_decode_time_seconds"]),
    "prompt_tokens": ("counter", set(), ["vllm:prompt_tokens"]),
    "generation_tokens": ("counter", set(), ["vllm:generation_tokens"]),
    "prefix_cache_queries": ("counter", set(), ["vllm:prefix_cache_queries"]),
    "prefix_cache_hits": ("counter", set(), ["vllm:prefix_cache_hits"]),
    "prefix_cache_hits_by_tier": ("counter", {"tier"}, []),
    "prefill_saved_seconds": ("counter", set(), []),
    "kv_store_declined_tokens": ("counter", set(), []),
    "kv_store_bytes": ("gauge", set(), []),
    "kv_store_reads": ("gauge", set(), []),
    "kv_store_read_bytes": ("counter", set(), []),
    "kv_store_written_bytes": ("counter", set(), []),
    "kv_store_damaged_files": ("counter", set(), []),
    "remote_prefills": ("counter", {"result"}, []),
    "remote_prefill_time_seconds": ("histogram", set(), []),
    "remote_prefill_tokens": ("counter", set(), []),
    "remote_prefill_lost_tokens": ("counter", set(), []),
    "handed_over_tokens": ("counter", set(), []),
    "requests": ("counter", {"finish_reason"}, ["vllm:request_success"]),
    "preemptions": ("counter", set(), ["vllm:num_preemptions"]),
    "draft_tokens": ("counter", set(), ["vllm:spec_decode_num_draft_tokens"]),
    "accepted_draft_tokens": ("counter", set(), ["vllm:spec_decode_num_accepted_tokens"]),
    "drafting_seconds": ("counter", set(), []),
    "rejections": ("counter", {"reason"}, []),
    "broken_streams": ("counter", {"reason"}, []),
    "slo_requests": ("counter", {"slo", "outcome"}, []),
    "answer_memory_reserved_bytes": ("gauge", set(), []),
    "refusal_answers": ("counter", {"how"}, []),
    "key_requests": ("counter", {"key"}, []),
    "key_tokens": ("counter", {"key", "kind"}, []),
    "key_rejections": ("counter", {"key", "reason"}, []),
    "engine_restarts": ("counter", set(), []),
    "step_duration_seconds": ("histogram", {"phase"}, []),
    "step_prediction_ratio": ("histogram", {"phase"}, []),
    "step_floor_seconds": ("counter", {"phase", "bound"}, []),
    "ceiling_read_bytes_per_second": ("gauge", set(), []),
    "ceiling_flops_per_second": ("gauge", set(), []),
    "step_tokens": ("histogram", {"phase"}, []),
    "iteration_tokens": ("histogram", set(), ["vllm:iteration_tokens_total"]),
    "requests_waiting_by_reason": ("gauge", {"reason"}, ["vllm:num_requests_waiting_by_reason"]),
    "http_requests": ("counter", {"handler", "method", "status"}, ["http_requests"]),
    "http_request_duration_seconds": ("histogram", {"handler", "method"}, ["http_request_duration_seconds"]),
}
VLLM_LABELS = {"model_name", "engine"}


def test_a_step_that_raised_was_not_mispredicted_and_has_no_price() -> None:
    metrics = busy_metrics()
    before = parse(metrics.render().decode())
    pool = PoolStats(10, 20, 34)
    metrics.on_step(StepStats(Phase.DECODE, 1, 3, 0.01, 0.0, 5, 7, pool, 2, 100, 50, 0.008))
    after = parse(metrics.render().decode())
    for name in ("twostep_step_prediction_ratio", "twostep_step_floor_seconds"):
        assert after[name] == before[name]


@pytest.mark.parametrize(("gap_s", "num_gaps", "sum_s"), [(0.5, 3, 0.5), (None, 2, 0.0)])
def test_tokens_of_one_step_have_no_gap_between_them(gap_s: float | None, num_gaps: int, sum_s: float) -> None:
    """The `timings` of a response count gaps in the same way."""
    metrics = Metrics("a model", False)
    metrics.on_tokens(3, gap_s)
    family = parse(metrics.render().decode())["twostep_inter_token_latency_seconds"]
    values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples}
    assert (values["_count"], values["_sum"]) == (num_gaps, sum_s)
    clock = TokenClock(0.0)
    if gap_s is not None:
        clock.add_tokens(1, 1.0)
    clock.start(FirstTokenInfo(0.0, 0, 1), 1.0)
    clock.add_tokens(3, 1.0 + (gap_s or 0.0))
    timings = clock.timings()
    assert timings is not None and (len(timings.inter_token_s), timings.decode_s) == (num_gaps, sum_s)


def busy_metrics(with_vllm_names: bool = True) -> Metrics:
    """Returns metrics in which every family has a sample."""
    metrics = Metrics("a model", with_vllm_names)
    metrics.on_engine_info(INFO)
    pool = PoolStats(10, 20, 34)
    decode = StepStats(Phase.DECODE, 1, 3, 0.01, 0.01, 5, 7, pool, 2, 100, 50, 0.008, 0.004, Bound.MEMORY)
    metrics.on_step(msgspec.structs.replace(decode, drafting_s=0.006, num_generated=2))
    prefill = StepStats(Phase.PREFILL, 1, 100, 0.1, 0.1, 5, 7, pool, 2, 100, 50)
    metrics.on_step(msgspec.structs.replace(prefill, num_generated=1, num_deferred=3))
    timings = RequestTimings(queue_s=0.001, prefill_s=0.002, inter_token_s=(0.004, 0.006))
    metrics.on_prompt(timings, 11)
    metrics.on_first_token(timings.ttft_s)
    metrics.on_tokens(1, None)
    metrics.on_tokens(1, 0.005)
    metrics.on_finish(FinishReason.STOP, timings)
    metrics.on_finish(FinishReason.ABORT, None)
    metrics.on_rejection("slow_down")
    metrics.on_broken_stream("internal_error")
    metrics.on_promise("ttft", "kept")
    metrics.on_refusal_answer("late")
    metrics.watch_queue(lambda: QueueStats(12, 345, 6.5))
    metrics.on_key_request("alice", TokenCounts(11, 4, 2), None)
    metrics.on_key_request("alice", None, "slow_down")
    metrics.on_http_request("/health", "GET", 200, 0.001)
    return metrics


class TestNames:
    @pytest.mark.parametrize("name", TABLE)
    def test_families_are_as_published(self, name: str) -> None:
        families = parse(busy_metrics().render().decode())
        kind, labels, aliases = TABLE[name]
        own = families[f"twostep_{name}"]
        assert own.type == kind
        assert {label for sample in own.samples for label in sample.labels} - {"le"} == labels
        for alias in aliases:
            extra = VLLM_LABELS if alias.startswith("vllm:") else set()
            found = {label for sample in families[alias].samples for label in sample.labels} - {"le"}
            assert families[alias].type == kind
            assert found == extra | {{"finish_reason": "finished_reason"}.get(x, x) for x in labels}

    def test_there_are_no_others(self) -> None:
        published = {f"twostep_{name}" for name in TABLE} | {
            alias for *_, aliases in TABLE.values() for alias in aliases
        }
        assert parse(busy_metrics().render().decode()).keys() == published

    def test_without_aliases_only_our_own_remain(self) -> None:
        assert parse(busy_metrics(with_vllm_names=False).render().decode()).keys() == {f"twostep_{x}" for x in TABLE}

    def test_own_names_are_what_promtool_wants(self) -> None:
        for family in parse(busy_metrics(with_vllm_names=False).render().decode()).values():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name) and family.documentation.endswith(".")
            for sample in family.samples:
                assert not sample.name.endswith("_created")
                assert sample.name.endswith("_total") == (family.type == "counter")

    def test_series_do_not_repeat(self) -> None:
        lines = [line for line in busy_metrics().render().decode().splitlines() if not line.startswith("#")]
        series = [line.rpartition(" ")[0] for line in lines]
        assert len(series) == len(set(series))


class TestValues:
    def value(self, name: str, **labels: str) -> float:
        families = parse(busy_metrics().render().decode())
        (value,) = [
            sample.value
            for family in families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return value

    def test_gauges_are_those_of_the_newest_step(self) -> None:
        assert self.value("twostep_requests_running") == 5
        assert self.value("twostep_requests_waiting") == self.value("vllm:num_requests_waiting") == 7
        assert self.value("twostep_kv_cache_usage_ratio") == 20 / 64
        assert [self.value("twostep_kv_blocks", state=state) for state in ("free", "held", "cached")] == [10, 20, 34]
        assert self.value("twostep_prefix_cache_hits_total") == 50

    def test_the_queue_has_gauges(self) -> None:
        assert self.value("twostep_waiting_tokens") == 345
        assert self.value("twostep_predicted_wait_seconds") == 6.5

    def test_each_key_has_its_own_counts(self) -> None:
        assert self.value("twostep_key_requests_total", key="alice") == 2
        assert self.value("twostep_key_tokens_total", key="alice", kind="prompt") == 11
        assert self.value("twostep_key_tokens_total", key="alice", kind="generated") == 2
        assert self.value("twostep_key_rejections_total", key="alice", reason="slow_down") == 1

    def test_requests_wait_for_room_or_for_their_grammars(self) -> None:
        for name in ("twostep_requests_waiting_by_reason", "vllm:num_requests_waiting_by_reason"):
            assert [self.value(name, reason=reason) for reason in ("capacity", "deferred")] == [4, 3]

    def test_iterations_count_what_is_read_and_what_is_written(self) -> None:
        """A step that verifies three tokens may generate two."""
        for name in ("twostep_iteration_tokens", "vllm:iteration_tokens_total"):
            assert self.value(f"{name}_sum") == 100 + 1 + 2
            assert [self.value(f"{name}_bucket", le=le) for le in ("1.0", "2.0", "64.0", "128.0")] == [0, 1, 1, 2]

    def test_phases_are_apart(self) -> None:
        assert self.value("twostep_step_tokens_sum", phase="prefill") == 100
        assert self.value("twostep_step_tokens_sum", phase="decode") == 3
        assert self.value("twostep_step_prediction_ratio_sum", phase="decode") == 1.25
        assert self.value("twostep_step_prediction_ratio_count", phase="prefill") == 0  # nothing was predicted
        assert self.value("twostep_drafting_seconds_total") == 0.006
        assert self.value("twostep_step_floor_seconds_total", phase="decode", bound="memory") == 0.004
        assert self.value("twostep_step_floor_seconds_total", phase="decode", bound="compute") == 0
        assert self.value("twostep_ceiling_read_bytes_per_second") == INFO.ceilings.read_bytes_per_s

    def test_a_request_is_measured_in_its_parts(self) -> None:
        assert self.value("twostep_time_to_first_token_seconds_sum") == 0.003
        assert self.value("twostep_request_decode_time_seconds_sum") == pytest.approx(0.01)
        assert self.value("twostep_time_per_output_token_seconds_sum") == pytest.approx(0.005)
        assert self.value("twostep_e2e_request_latency_seconds_sum") == pytest.approx(0.013)

    def test_tokens_are_counted_however_many_come_at_once(self) -> None:
        assert self.value("twostep_generation_tokens_total") == self.value("vllm:generation_tokens_total") == 2
        assert self.value("twostep_prompt_tokens_total") == 11

    def test_ends_are_counted_by_reason_from_zero(self) -> None:
        counts = [self.value("twostep_requests_total", finish_reason=reason) for reason in FinishReason]
        assert counts == [1, 0, 1, 0]

    def test_buckets_are_fine_at_both_ends(self) -> None:
        assert self.value("twostep_time_to_first_token_seconds_bucket", le="0.001") == 0
        assert self.value("twostep_inter_token_latency_seconds_bucket", le="0.0005") == 0
        assert self.value("twostep_time_to_first_token_seconds_bucket", le="300.0") == 1


def test_totals_go_on_over_a_restart_of_the_engine() -> None:
    metrics = busy_metrics()
    metrics.on_restart()
    families = parse(metrics.render().decode())
    values = {name: families[f"twostep_{name}"].samples[0].value for name in ("engine_restarts", "preemptions")}
    assert values == {"engine_restarts": 1, "preemptions": 2}
    assert families["twostep_requests_running"].samples[0].value == 0
    metrics.on_step(StepStats(Phase.DECODE, 1, 3, 0.01, 0.01, 5, 7, PoolStats(10, 20, 34), 4, 10, 5))
    metrics.on_restart()
    metrics.on_step(StepStats(Phase.DECODE, 1, 3, 0.01, 0.01, 5, 7, PoolStats(10, 20, 34), 1, 10, 5))
    families = parse(metrics.render().decode())
    names = ("engine_restarts", "preemptions", "prefix_cache_queries", "prefix_cache_hits")
    assert [families[f"twostep_{name}"].samples[0].value for name in names] == [2, 7, 120, 60]


def test_what_the_prefix_cache_found_goes_on_over_a_restart_and_what_the_store_has_does_not() -> None:
    collector = EngineCollector()
    step = StepStats(Phase.DECODE, 1, 3, 0.01, 0.01, 5, 7, PoolStats(10, 20, 34), 0, 100, 60)
    step = msgspec.structs.replace(
        step, prefix_disk_hits=16, prefill_saved_s=0.25, store_bytes=9000, store_reads=3, store_read_bytes=500
    )
    for _ in range(2):
        collector.stats = step
        before = collector.prefix_cache
        collector.on_restart()
    assert before == PrefixCacheTotals(
        prompt_tokens=200,
        memory_hit_tokens=88,
        disk_hit_tokens=32,
        prefill_saved_ms=500.0,
        disk_bytes=9000,
        disk_read_bytes=1000,
        disk_written_bytes=0,
        disk_reads=3,
    )
    assert collector.prefix_cache == before.model_copy(update={"disk_bytes": 0, "disk_reads": 0})


def test_a_scrape_waits_for_the_numbers_after_the_last_end(server: LiveServer) -> None:
    server.client.get("/metrics")
    assert server.engine.num_settled == 1


def test_counters_advance_by_exactly_the_tokens_sent(server: LiveServer) -> None:
    advanced = advance(
        server,
        lambda: (
            server.complete("Hi", max_tokens=5, n=2),
            chunks_of(server.complete("Hello", max_tokens=7, stream=True)),
        ),
    )
    assert advanced("twostep_generation_tokens_total") == 17
    assert advanced("twostep_prompt_tokens_total") == 9  # as in both usages
    assert advanced("twostep_requests_total", finish_reason="length") == 3
    assert advanced("twostep_inter_token_latency_seconds_count") == 14
    assert advanced("twostep_time_to_first_token_seconds_count") == 3
    assert advanced("twostep_http_requests_total", handler="/v1/completions", method="POST", status="200") == 2
    assert advanced("http_request_duration_seconds_count", handler="/v1/completions", method="POST") == 2


def test_what_has_no_token_has_no_first_one(server: LiveServer) -> None:
    def act() -> None:
        server.client.post("/v1/embeddings", json={"input": ["Hi", "Hello"]})
        server.complete("Hi", max_tokens=0, echo=True)

    advanced = advance(server, act)
    assert advanced("twostep_prompt_tokens_total") == 12
    assert advanced("twostep_request_prefill_time_seconds_count") == 3
    assert advanced("twostep_time_to_first_token_seconds_count") == 0
    assert advanced("twostep_e2e_request_latency_seconds_count") == 0


def test_a_request_refused_before_its_route_is_counted_with_it() -> None:
    with live_server(api_key=["secret"]) as server:
        refused = advance(server, lambda: (server.complete("Hi"), server.client.get("/v1/models/x")))
    assert refused("twostep_http_requests_total", handler="/v1/completions", method="POST", status="401") == 1
    assert refused("twostep_http_requests_total", handler="/v1/models/{name:path}", method="GET", status="401") == 1


def test_after_the_last_request_nothing_is_held(server: LiveServer) -> None:
    server.complete("Hi")
    server.wait_until_idle()
    families = parse(server.client.get("/metrics").text)
    held = [s.value for s in families["twostep_kv_blocks"].samples if s.labels["state"] == "held"]
    assert held == [families["twostep_requests_running"].samples[0].value] == [0]


def test_refused_work_is_counted_by_reason(server: LiveServer) -> None:
    def act() -> None:
        server.complete("x" * 600)
        server.complete("Hi", model="other")
        server.client.get("/nothing")
        server.client.request("PROPFIND", "/coffee")

    advanced = advance(server, act)
    assert advanced("twostep_rejections_total", reason="context_length_exceeded") == 1
    assert advanced("twostep_rejections_total", reason="model_not_found") == 1
    assert advanced("twostep_http_requests_total", handler="none", method="GET", status="404") == 1
    assert advanced("twostep_http_requests_total", handler="none", method="OTHER", status="404") == 1
    assert advanced("twostep_http_requests_total", handler="/v1/completions", method="POST", status="404") == 1


def test_paths_do_not_become_labels(server: LiveServer) -> None:
    for number in range(5):
        server.client.get(f"/v1/models/{number}")
    text = server.client.get("/metrics").text
    assert 'handler="/v1/models/{name:path}"' in text and "/v1/models/3" not in text
