"""vLLM's metric names, which dashboards, autoscalers and gateways already read, as aliases of this server's own."""

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_OWN_PREFIX = "twostep_"

# Own metric family, without prefix -> vLLM's families. Counters are named without _total.
_VLLM: Mapping[str, tuple[str, ...]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "requests_waiting_by_reason": ("num_requests_waiting_by_reason",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc",),
    "cache_config_info": ("cache_config_info",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prefix_cache_hits": ("prefix_cache_hits",),
    "requests": ("request_success",),
    "preemptions": ("num_preemptions",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_draft_tokens": ("spec_decode_num_accepted_tokens",),
    "iteration_tokens": ("iteration_tokens_total",),
}
_RENAMED_LABELS = {"finish_reason": "finished_reason"}
# Named without any prefix, as prometheus-fastapi-instrumentator does.
_PLAIN = frozenset({"http_requests", "http_request_duration_seconds"})


class Exposition(Collector):
    """The own metrics, without the client library's `_created` series; with vLLM's names, too, if a model name is
    given."""

    def __init__(self, own: Collector, model_name: str | None) -> None:
        self._own = own
        self._vllm_labels = None if model_name is None else {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for metric in self._own.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
            if self._vllm_labels is not None:
                yield from _aliases(metric, self._vllm_labels)


def _aliases(metric: Metric, vllm_labels: Mapping[str, str]) -> Iterator[Metric]:
    name = metric.name.removeprefix(_OWN_PREFIX)
    for alias in _VLLM.get(name, ()):
        yield _renamed(metric, f"vllm:{alias}", vllm_labels)
    if name in _PLAIN:
        yield _renamed(metric, name, {})


def _renamed(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """Returns the metric under another name, with its labels renamed and `labels` added."""
    alias = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        own = {_RENAMED_LABELS.get(label, label): value for label, value in sample.labels.items()}
        alias.samples.append(Sample(name + sample.name.removeprefix(metric.name), {**own, **labels}, sample.value))
    return alias
