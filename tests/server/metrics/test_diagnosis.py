"""Slow to start or slow to stream: the answer follows from the numbers, and the advice from the cause."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.metrics.diagnosis import Load, diagnose
from server.metrics.engine_collector import EngineCollector
from server.protocol.stats import Percentiles, RecentRequests, RecentSteps, Stats, Totals
from tests.server.live_server import live_server

LOAD = Load(running=3, waiting=0, kv_held_ratio=0.2, max_num_seqs=8, target_itl_ms=250, is_quantized=False)


def times(p50: float, p90: float | None = None, p99: float | None = None) -> Percentiles:
    p90 = p50 if p90 is None else p90
    return Percentiles(p50=p50, p90=p90, p99=p99 or p90, max=p99 or p90)


def steps(bound: Literal["compute", "memory"] = "memory", of_ceiling: float | None = 0.8) -> RecentSteps:
    return RecentSteps(count=9, tokens=4, mean_ms=20, of_ceiling=of_ceiling, bound=bound)


def stats(
    queue: float = 1, prefill: float = 100, decode: float = 2000, gaps: Percentiles | None = None, **others: Any
) -> Stats:
    recent = RecentRequests(
        count=10,
        over_s=60,
        queue_ms=times(queue),
        prefill_ms=times(prefill),
        ttft_ms=times(queue + prefill),
        decode_ms=times(decode),
        itl_ms=gaps or times(20),
        e2e_ms=times(queue + prefill + decode),
    )
    parts = {"prefill": steps("compute"), "decode": steps(), "prefix_cache": EngineCollector().prefix_cache, **others}
    return Stats(totals=Totals(requests=10, prompt_tokens=10, generated_tokens=10), requests=recent, **parts)


def test_fast_answers_are_slow_in_neither_way_and_need_no_advice() -> None:
    found = diagnose(stats(), LOAD)
    assert (found.verdict, found.cause, found.advice) == ("neither", "decode", [])
    assert "within 101 ms" in found.sentence and "every 20 ms" in found.sentence and "writing" in found.sentence


def test_a_share_that_is_not_known_is_told_and_no_reason_for_advice() -> None:
    slow = stats(gaps=times(150)).model_copy(update={"decode": steps(of_ceiling=None)})
    found = diagnose(slow, LOAD)
    assert "at an unknown share of what the machine could do" in " ".join(found.evidence)
    assert not any("far from what" in each for each in found.advice)


@pytest.mark.parametrize(("queue", "prefill", "cause"), [(3000, 200, "queue"), (200, 3000, "prefill")])
def test_slow_to_start_names_the_phase_before_the_first_token(queue: float, prefill: float, cause: str) -> None:
    found = diagnose(stats(queue, prefill, decode=60_000), LOAD)
    assert (found.verdict, found.cause) == ("start", cause) and found.sentence.startswith("Slow to start: ")
    assert "3.2 s" in found.sentence and ("in the queue" if cause == "queue" else "the prompt") in found.sentence


def test_slow_to_stream_is_about_the_gaps() -> None:
    found = diagnose(stats(gaps=times(150)), LOAD)
    assert (found.verdict, found.cause) == ("stream", "decode") and "every 150 ms" in found.sentence
    assert any("--quantization" in each for each in found.advice)


def test_rare_long_gaps_are_stalls() -> None:
    found = diagnose(stats(gaps=times(20, 30, 2500)), LOAD)
    assert found.verdict == "stream" and "2.5 s" in found.sentence
    assert len(found.advice) == 1 and "--target-itl-ms (250 now)" in found.advice[0]


def test_both_can_be_slow() -> None:
    found = diagnose(stats(queue=5000, decode=1000, gaps=times(400)), LOAD)
    assert (found.verdict, found.cause) == ("both", "queue")
    assert "5.1 s" in found.sentence and "every 400 ms" in found.sentence and len(found.advice) >= 2


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"kv_held_ratio": 0.95}, "--kv-cache-memory-bytes"),
        ({"running": 8}, "--max-num-seqs"),
        ({}, "--target-itl-ms"),
        ({"running": 0}, "add another one"),
    ],
)
def test_advice_on_a_queue_follows_from_what_is_full(changes: dict[str, Any], advice: str) -> None:
    assert advice in diagnose(stats(queue=5000), replace(LOAD, **changes)).advice[0]


@pytest.mark.parametrize(
    ("decode", "is_quantized", "advice"),
    [
        (steps("memory"), False, "--quantization"),
        (steps("memory"), True, "draft"),
        (steps("compute"), False, "--max-num-seqs"),
        (steps("memory", 0.2), False, "twostep doctor"),
    ],
)
def test_advice_on_slow_streams_follows_from_what_bounds_steps(
    decode: RecentSteps, is_quantized: bool, advice: str
) -> None:
    found = diagnose(
        stats(gaps=times(300)).model_copy(update={"decode": decode}), replace(LOAD, is_quantized=is_quantized)
    )
    assert len(found.advice) == 1 and advice in found.advice[0]


def test_what_the_prefix_cache_found_is_told_where_prompts_take_long() -> None:
    cache = EngineCollector().prefix_cache.model_copy(update={"prompt_tokens": 100, "memory_hit_tokens": 25})
    found = diagnose(stats(prefill=4000, prefix_cache=cache), LOAD)
    assert "25% of prompts" in found.advice[0]


TIME = st.floats(0, 1e7)


@given(TIME, TIME, TIME, st.builds(times, TIME, TIME, TIME), st.integers(0, 99), st.floats(0, 1))
def test_there_is_an_answer_to_all_numbers(
    queue: float, prefill: float, decode: float, gaps: Percentiles, running: int, kv_held_ratio: float
) -> None:
    found = diagnose(stats(queue, prefill, decode, gaps), replace(LOAD, running=running, kv_held_ratio=kv_held_ratio))
    assert (found.verdict == "neither") == (found.advice == [])
    assert (found.verdict in ("start", "both")) == (queue + prefill > 1000)
    assert found.sentence.endswith(".") and "e+" not in " ".join([found.sentence, *found.evidence])


def test_a_server_says_nothing_before_an_answer_and_something_after() -> None:
    with live_server() as server:
        assert server.client.get("/stats/diagnosis").json()["verdict"] == "unknown"
        server.complete("Hi", max_tokens=4)
        server.wait_until_idle()
        found = server.client.get("/stats/diagnosis").json()
    assert found["verdict"] == "neither" and "1.0 ms in the queue" in found["evidence"][0]
    assert "0 of at most 64 run" in found["evidence"][-1]
