"""`GET /stats/timeline`: nothing is lost between two looks, and every key sees its own."""

import gc
import math
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import Phase
from engine.core.machine import Ceilings
from engine.core.stats import StepShare
from server.metrics.timeline import NUM_REQUESTS, NUM_SECONDS, NUM_SHARES, NUM_STEPS, Timeline
from server.protocol.timeline import TimelineBody
from tests.clock import Clock
from tests.server.live_server import LiveServer, live_server
from tests.server.metrics.steps import step


def timeline_at(now_s: float) -> tuple[Timeline, Clock]:
    clock = Clock()
    timeline = Timeline(clock)
    clock.now_s = now_s
    return timeline, clock


@given(st.lists(st.tuples(st.floats(0, 90), st.floats(0.001, 30), st.integers(1, 99)), max_size=30))
def test_tokens_and_time_of_steps_are_spread_and_none_is_lost(spans: list[tuple[float, float, int]]) -> None:
    timeline, _ = timeline_at(100.0)
    for start_s, duration_s, num_tokens in spans:
        timeline.add_step(step(Phase.PREFILL, start_s + duration_s, duration_s, num_tokens))
    seconds = timeline.since(0, "", "")["seconds"]
    assert math.isclose(
        sum(each["prefill_tokens"] for each in seconds), sum(span[2] for span in spans), abs_tol=0.05 * len(seconds)
    )
    assert math.isclose(sum(each["prefill_ms"] for each in seconds), 1000 * sum(span[1] for span in spans), abs_tol=0.1)
    assert [each["start_ms"] for each in seconds] == sorted({each["start_ms"] for each in seconds})


@given(st.lists(st.sampled_from(["prefill", "decode", "first", "token", "request", "look"]), max_size=60))
def test_who_looks_often_sees_what_one_look_sees(events: list[str]) -> None:
    timeline, clock = timeline_at(0.0)
    cursor, seen = 0, {"seconds": {}, "steps": [], "requests": []}

    def look() -> None:
        nonlocal cursor
        new = timeline.since(cursor, "mine", "mine")
        cursor = new["cursor"]
        seen["seconds"] |= {each["start_ms"]: each for each in new["seconds"]}
        seen["steps"] += new["steps"]
        seen["requests"] += new["requests"]

    for event in events:
        clock.now_s += 0.3
        if event == "look":
            look()
        elif event == "first":
            timeline.add_first_token(0.2, clock.now_s)
        elif event == "token":
            timeline.add_tokens(2, 0.1, clock.now_s)
        elif event == "request":
            timeline.add_request("mine", clock.now_s - 0.1, {"id": "x"})
        else:
            timeline.add_step(step(Phase(event), clock.now_s, 0.7))
    look()
    whole = timeline.since(0, "mine", "mine")
    assert list(seen["seconds"].values()) == whole["seconds"]
    assert (seen["steps"], seen["requests"]) == (whole["steps"], whole["requests"])


def test_a_step_is_told_as_it_was() -> None:
    timeline, _ = timeline_at(10.0)
    timeline.add_step(step(None, 1.0, 0.0))  # nothing ran
    timeline.add_step(step(Phase.DECODE, 2.5, 0.2, held=4))
    (told,) = timeline.since(0, "", "")["steps"]
    assert told == {
        "phase": "decode", "end_ms": 2500, "duration_ms": 200, "model_ms": 150, "floor_ms": 40, "bound": "memory",
        "requests": 2, "tokens": 8, "generated_tokens": 8,
        "kv_held_blocks": 4, "kv_cached_blocks": 0, "kv_free_blocks": 6, "computed": [],
    }  # fmt: skip
    (second,) = timeline.since(0, "", "")["seconds"]
    assert (second["start_ms"], second["kv_held_ratio"], second["decode_tokens"]) == (2000, 0.4, 8)
    assert (second["running"], second["waiting"], second["ttft_ms"]) == (2, 1, None)


def test_the_floor_of_a_step_is_not_told_while_the_peaks_are_in_doubt() -> None:
    timeline, _ = timeline_at(10.0)
    doubtful = msgspec.structs.replace(step(Phase.DECODE, 2.5, 0.2), ceilings=Ceilings(1.0, 1.0, is_in_doubt=True))
    timeline.add_step(doubtful)
    assert timeline.since(0, "", "")["steps"][0]["floor_ms"] is None


def test_a_step_tells_what_it_computed_of_the_keys_own_requests() -> None:
    timeline, _ = timeline_at(10.0)
    shares = [StepShare("mine", "a", 0, 7), StepShare("theirs", "b", 3, 4), StepShare("mine", "c", 9, 10)]
    timeline.add_step(step(Phase.PREFILL, 1.0, 0.1), shares)
    (told,) = timeline.since(0, "mine", "mine")["steps"]
    assert told["computed"] == [{"id": "a", "start": 0, "end": 7}, {"id": "c", "start": 9, "end": 10}]
    assert timeline.since(0, "mine", "nobody")["steps"][0]["computed"] == []


@given(st.lists(st.sampled_from([0, 1, NUM_SHARES // 4, NUM_SHARES // 2, NUM_SHARES]), max_size=12))
def test_what_steps_computed_is_kept_of_the_newest(nums: list[int]) -> None:
    timeline, _ = timeline_at(10.0)
    for num in nums:
        timeline.add_step(step(Phase.DECODE, 1.0, 0.1), [StepShare("", "a", 0, 1)] * num)
    told = [each["computed"] for each in timeline.since(0, "", "")["steps"]]
    kept = [sum(nums[index:]) <= NUM_SHARES for index in range(len(nums))]
    assert [None if each is None else len(each) for each in told] == [
        num if is_kept else None for num, is_kept in zip(nums, kept, strict=True)
    ]


def test_latencies_of_a_second_are_mean_and_maximum() -> None:
    timeline, _ = timeline_at(1.0)
    timeline.add_first_token(0.1, 0.2)
    timeline.add_first_token(0.3, 0.9)
    timeline.add_tokens(1, None, 0.2)  # a request's first has no gap
    timeline.add_tokens(3, 0.06, 0.5)  # tokens of one step come together
    (second,) = timeline.since(0, "", "")["seconds"]
    assert second["ttft_ms"] == {"mean": 200, "max": 300} and second["itl_ms"] == {"mean": 20, "max": 60}


def test_only_so_much_is_kept() -> None:
    timeline, clock = timeline_at(0.0)
    for number in range(NUM_STEPS + 50):
        clock.now_s = number + 0.5
        timeline.add_step(step(Phase.DECODE, clock.now_s, 0.1))
        timeline.add_request("", 0.0, {"id": number})
    kept = timeline.since(0, "", "")
    assert [len(kept[name]) for name in ("steps", "seconds", "requests")] == [NUM_STEPS, NUM_SECONDS, NUM_REQUESTS]
    assert kept["requests"][-1]["id"] == NUM_STEPS + 49
    clock.now_s += NUM_SECONDS
    assert timeline.since(0, "", "")["seconds"] == []


def test_the_garbage_collector_does_not_look_at_what_is_kept_of_steps() -> None:
    timeline, _ = timeline_at(0.0)
    share = StepShare("tenant", "mine", 0, 3)
    timeline.add_step(step(Phase.DECODE, 1.0, 0.1), (share,))
    (kept,) = timeline._steps
    assert not any(gc.is_tracked(each) for each in (kept, kept.stats, kept.stats.pool, share))


def test_a_span_longer_than_what_is_kept_does_no_harm() -> None:
    timeline, _ = timeline_at(1e6)
    timeline.add_step(step(Phase.PREFILL, 1e6, 1e6))
    assert len(timeline.since(0, "", "")["seconds"]) == NUM_SECONDS


def test_a_cursor_of_an_earlier_server_gets_everything() -> None:
    timeline, _ = timeline_at(1.0)
    timeline.add_request("", 0.0, {"id": "a"})
    assert timeline.since(1, "", "")["requests"] == [] and len(timeline.since(99, "", "")["requests"]) == 1


def told_of(server: LiveServer, key: str = "", after: int = 0) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body: dict[str, Any] = server.client.get(f"/stats/timeline?after={after}", headers=headers).json()
    parsed = TimelineBody.model_validate(body)
    assert parsed.model_dump(exclude_unset=True) == body
    return body


def test_a_server_tells_of_ended_requests_with_their_timings() -> None:
    with live_server() as server:
        answer = server.complete("Hi", max_tokens=3, headers={"X-Request-Id": "a"}).json()
        server.wait_until_idle()
        body = told_of(server)
        (request,) = body["requests"]
        assert request["timings"] == answer["timings"] and request["id"] == "a" and request["finish"] == "length"
        assert request["arrival_ms"] <= request["end_ms"] <= body["now_ms"] and request["model"] == "fake"
        (second,) = [each for each in body["seconds"] if each["ttft_ms"]]
        assert second["ttft_ms"] == {"mean": 3, "max": 3} and second["itl_ms"]["max"] == 0.5
        assert told_of(server, after=body["cursor"])["requests"] == []
        assert server.client.get("/stats/timeline?after=-1").status_code == 400


def test_what_has_no_tokens_of_its_own_is_not_told_as_if_its_client_had_left() -> None:
    with live_server() as server:
        assert server.post_json("/v1/embeddings", {"input": ["Hi", "Ho"]}).status_code == 200
        server.wait_until_idle()
        (request,) = told_of(server)["requests"]
        assert request["finish"] == "length"


def test_an_api_key_is_told_of_its_own_requests_alone() -> None:
    with live_server(api_key=["mine", "theirs"]) as server:
        server.complete("Hi", headers={"Authorization": "Bearer theirs"})
        server.wait_until_idle()
        assert told_of(server, "mine")["requests"] == [] and len(told_of(server, "theirs")["requests"]) == 1
        assert server.client.get("/stats/timeline").status_code == 401
