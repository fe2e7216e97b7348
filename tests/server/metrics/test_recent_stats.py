"""`GET /stats`, and the page that shows it."""

import math

from engine.core.batch import Phase
from engine.core.machine import Bound, Ceilings
from engine.core.stats import PoolStats, RequestTimings, StepStats
from server.metrics.engine_collector import EngineCollector
from server.metrics.recent_stats import NUM_GAPS, NUM_REQUESTS, RecentStats
from server.protocol.stats import Percentiles, RecentSteps
from tests.server.live_server import live_server

NOTHING_FOUND = EngineCollector().prefix_cache


def timings(ttft_ms: int, *gaps_ms: int) -> RequestTimings:
    return RequestTimings(queue_s=0.001, prefill_s=(ttft_ms - 1) / 1e3, inter_token_s=tuple(ms / 1e3 for ms in gaps_ms))


def step(
    phase: Phase | None, num_tokens: int, model_s: float, floor_s: float | None, ceilings: Ceilings | None = None
) -> StepStats:
    facts = phase, 1, num_tokens, 2 * model_s, model_s, 1, 0, PoolStats(1, 0, 0), 0, 0, 0, None, floor_s, Bound.MEMORY
    return StepStats(*facts, ceilings=ceilings)


def test_without_requests_there_are_no_times() -> None:
    stats = RecentStats().summary(NOTHING_FOUND)
    assert stats.prefill is stats.decode is stats.requests.queue_ms is stats.requests.itl_ms is None
    assert stats.requests.count == stats.totals.requests == 0


def test_percentiles_are_of_the_newest() -> None:
    recent = RecentStats(clock=iter([*map(float, range(NUM_REQUESTS + 7)), 2000.0]).__next__)
    for ttft_ms in range(1, NUM_REQUESTS + 8):
        recent.add_end(timings(ttft_ms, 3))
    stats = recent.summary(NOTHING_FOUND)
    assert (stats.requests.count, stats.totals.requests) == (NUM_REQUESTS, NUM_REQUESTS + 7)
    assert stats.requests.over_s == 2000 - 7
    assert stats.requests.ttft_ms == Percentiles(p50=507, p90=907, p99=997, max=1007)
    assert stats.requests.decode_ms == Percentiles(p50=3, p90=3, p99=3, max=3)


def test_a_sequence_without_a_token_is_counted_and_has_no_times() -> None:
    recent = RecentStats()
    recent.add_end(None)
    stats = recent.summary(NOTHING_FOUND)
    assert (stats.totals.requests, stats.requests.count, stats.requests.e2e_ms) == (1, 0, None)


def test_gaps_are_of_the_newest_tokens_of_all() -> None:
    recent = RecentStats()
    recent.add_tokens(1, [])
    for _ in range(NUM_GAPS):
        recent.add_tokens(2, [0.5, 0.0])
    gaps_ms = recent.summary(NOTHING_FOUND).requests.itl_ms
    assert gaps_ms == Percentiles(p50=0, p90=500, p99=500, max=500)
    assert recent.summary(NOTHING_FOUND).totals.generated_tokens == 2 * NUM_GAPS + 1


def test_steps_are_by_phase_with_their_share_of_the_ceiling() -> None:
    recent = RecentStats()
    for each in (
        step(Phase.DECODE, 4, 0.010, 0.008),
        step(Phase.DECODE, 8, 0.030, 0.012),
        step(Phase.PREFILL, 100, 0.2, None),  # one that raised
        step(None, 0, 0.0, None),
    ):
        recent.add_step(each)
    stats = recent.summary(NOTHING_FOUND)
    assert stats.decode == RecentSteps(count=2, tokens=6, mean_ms=40, of_ceiling=0.5, bound="memory")
    assert stats.prefill is None


def test_the_share_of_a_ceiling_in_doubt_is_not_known() -> None:
    recent, doubtful = RecentStats(), Ceilings(1.0, 1.0, is_in_doubt=True)
    recent.add_step(step(Phase.DECODE, 4, 0.010, 0.009, doubtful))
    stats = recent.summary(NOTHING_FOUND)
    assert stats.decode == RecentSteps(count=1, tokens=4, mean_ms=20, of_ceiling=None, bound="memory")
    recent.add_step(step(Phase.DECODE, 4, 0.010, 0.002, Ceilings(1.0, 1.0)))
    found = recent.summary(NOTHING_FOUND).decode
    assert found is not None and (found.count, found.of_ceiling) == (2, 0.2)


def test_a_server_tells_what_it_did() -> None:
    with live_server() as server:  # one of its own, since totals count all requests
        server.complete("Hi", max_tokens=5)
        server.wait_until_idle()
        stats = server.client.get("/stats").json()
    assert stats["totals"] == {"requests": 1, "prompt_tokens": 3, "generated_tokens": 5}
    assert stats["prefix_cache"] == NOTHING_FOUND.model_dump()
    recent = stats["requests"]
    assert recent["count"] == 1 and recent["itl_ms"]["max"] == 0.5
    whole = recent["queue_ms"]["p50"] + recent["prefill_ms"]["p50"] + recent["decode_ms"]["p50"]
    assert math.isclose(recent["e2e_ms"]["p50"], whole, abs_tol=0.002)
