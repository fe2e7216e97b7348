"""Metrics of the engine, made from its newest step's statistics when Prometheus scrapes: none cost time per step."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.core.config import EngineInfo
from engine.core.machine import Ceilings
from engine.core.stats import PoolStats, QueueStats, StepStats, totals_of
from server.protocol.stats import PrefixCacheTotals


class EngineCollector(Collector):
    """Collects the engine's gauges and totals. Totals are not reset by restarts of the engine process."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        """Set when the model is loaded."""
        self.stats: StepStats | None = None
        """Statistics of the newest step."""
        self.queue_stats: Callable[[], QueueStats] = lambda: QueueStats(0, 0, 0.0)
        """Returns the state of the admission queue."""
        self.answer_bytes: Callable[[], int] = lambda: 0
        """Returns the bytes reserved for answers that are not streamed."""
        self._num_restarts = 0
        self._totals_before = totals_of(None)  # of engine processes that died

    def on_restart(self) -> None:
        """Keeps the totals of the engine process that died. Call before the first step of the new process, which counts
        from 0."""
        self._num_restarts += 1
        self._totals_before = self._totals()
        self.stats = None

    def collect(self) -> Iterator[Metric]:
        stats, info, queue = self.stats, self.info, self.queue_stats()
        pool = stats.pool if stats else PoolStats(info.num_blocks if info else 0, 0, 0)
        total = pool.free + pool.held + pool.cached
        yield self._gauge("requests_running", "Requests being computed.", stats.num_running if stats else 0)
        yield self._gauge("requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting if stats else 0)
        yield self._waiting(stats)
        yield self._gauge("waiting_tokens", "Prompt tokens that wait to be computed.", queue.num_waiting_tokens)
        yield self._gauge("predicted_wait_seconds", "Wait of a new request to be scheduled.", queue.predicted_wait_s)
        text = "Memory reserved for answers that are not streamed."
        yield self._gauge("answer_memory_reserved_bytes", text, self.answer_bytes())
        yield self._gauge("kv_cache_usage_ratio", "Share of KV blocks held.", pool.held / total if total else 0.0)
        yield self._blocks(pool)
        yield self._config(info)
        yield self._engine(info)
        measured = Ceilings(0.0, 0.0) if info is None else info.ceilings
        yield from self._peaks(measured if stats is None or stats.ceilings is None else stats.ceilings)
        totals = self._totals()
        yield self._total("preemptions", "Requests preempted for want of KV blocks.", totals["num_preemptions"])
        yield self._total("prefix_cache_queries", "Prompt tokens looked up.", totals["prefix_queries"])
        yield self._total("prefix_cache_hits", "Prompt tokens found.", totals["prefix_hits"])
        yield self._hits(totals)
        text = "Predicted time that computing the prompt tokens found would have taken."
        yield self._total("prefill_saved_seconds", text, totals["prefill_saved_s"])
        text = "Tokens in the KV store that were computed, which was predicted to be faster."
        yield self._total("kv_store_declined_tokens", text, totals["prefix_disk_declined"])
        yield self._gauge("kv_store_bytes", "Size of the KV store's files.", stats.store_bytes if stats else 0)
        yield self._gauge("kv_store_reads", "Files of the KV store being read.", stats.store_reads if stats else 0)
        yield self._total("kv_store_read_bytes", "Bytes read from the KV store.", totals["store_read_bytes"])
        yield self._total("kv_store_written_bytes", "Bytes written to the KV store.", totals["store_written_bytes"])
        yield self._total("kv_store_damaged_files", "Damaged files of the KV store.", totals["store_damaged_files"])
        yield self._total("draft_tokens", "Draft tokens verified.", totals["num_drafts"])
        yield self._total("accepted_draft_tokens", "Draft tokens accepted.", totals["num_accepted_drafts"])
        yield self._total("engine_restarts", "Restarts of the engine process.", self._num_restarts)

    @property
    def prefix_cache(self) -> PrefixCacheTotals:
        """What the prefix cache found since the server started, and the KV store at the newest step."""
        totals, stats = self._totals(), self.stats
        on_disk = int(totals["prefix_disk_hits"])
        return PrefixCacheTotals(
            prompt_tokens=int(totals["prefix_queries"]),
            memory_hit_tokens=int(totals["prefix_hits"]) - on_disk,
            disk_hit_tokens=on_disk,
            prefill_saved_ms=round(totals["prefill_saved_s"] * 1e3, 3),
            disk_bytes=stats.store_bytes if stats else 0,
            disk_read_bytes=int(totals["store_read_bytes"]),
            disk_written_bytes=int(totals["store_written_bytes"]),
            disk_reads=stats.store_reads if stats else 0,
        )

    def _totals(self) -> dict[str, float]:
        return {name: self._totals_before[name] + value for name, value in totals_of(self.stats).items()}

    def _waiting(self, stats: StepStats | None) -> Metric:
        text = "Requests waiting, for room to be computed or for their grammars."
        family = GaugeMetricFamily("twostep_requests_waiting_by_reason", text, labels=["reason"])
        num_waiting, num_deferred = (stats.num_waiting, stats.num_deferred) if stats else (0, 0)
        family.add_metric(["capacity"], num_waiting - num_deferred)
        family.add_metric(["deferred"], num_deferred)
        return family

    def _hits(self, totals: Mapping[str, float]) -> Metric:
        text = "Prompt tokens found, by where: in memory, or on disk, in the KV store."
        family = CounterMetricFamily("twostep_prefix_cache_hits_by_tier", text, labels=["tier"])
        on_disk = totals["prefix_disk_hits"]
        family.add_metric(["memory"], totals["prefix_hits"] - on_disk)
        family.add_metric(["disk"], on_disk)
        return family

    def _blocks(self, pool: PoolStats) -> Metric:
        family = GaugeMetricFamily("twostep_kv_blocks", "KV blocks by state.", labels=["state"])
        for state in ("free", "held", "cached"):
            family.add_metric([state], getattr(pool, state))
        return family

    def _peaks(self, peaks: Ceilings) -> Iterator[Metric]:
        text = "Memory read per second, measured at start, and raised by steps that beat it."
        yield self._gauge("ceiling_read_bytes_per_second", text, peaks.read_bytes_per_s)
        text = "FLOP per second of a GEMM, measured at start, and raised by steps that beat it."
        yield self._gauge("ceiling_flops_per_second", text, peaks.flops_per_s)

    def _config(self, info: EngineInfo | None) -> Metric:
        labels = ["block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("twostep_cache_config_info", "Shape of the KV cache.", labels=labels)
        if info is not None:
            family.add_metric([str(info.block_size), str(info.num_blocks)], 1)
        return family

    def _engine(self, info: EngineInfo | None) -> Metric:
        labels = ["device", "dtype", "forward", "attention", "linear"]
        family = GaugeMetricFamily("twostep_engine_info", "What computes the steps.", labels=labels)
        if info is not None:
            family.add_metric([getattr(info, label) for label in labels], 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"twostep_{name}", text, value)

    def _total(self, name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(f"twostep_{name}", text, value)
