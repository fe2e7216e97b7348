import json
from typing import Any

import pytest

from loadtest.collector import StreamCollector
from loadtest.record import Outcome, Reply, Usage


def collected(*events: Any, done: bool = True) -> StreamCollector:
    """Returns a collector after these events, which arrive at 1, 2, 3, ... seconds."""
    collector = StreamCollector()
    data = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
    for now_s, event in enumerate([*data, b"[DONE]"] if done else data, start=1):
        collector.on_event(event, float(now_s))
    return collector


def token(text: str = "a", finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **more}


def usage(completion: int, prompt: int = 3, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


def reply(arrivals_s: list[float], completion_tokens: int | None = None) -> Reply:
    reported = None if completion_tokens is None else Usage(1, completion_tokens)
    return Reply(Outcome.OK, sent_s=10.0, ended_s=99.0, arrivals_s=arrivals_s, usage=reported)


def test_latencies_follow_their_definitions() -> None:
    seen = reply([10.5, 11.0, 13.0], completion_tokens=3)
    assert (seen.ttft_s, seen.itl_s, seen.tpot_s, seen.e2e_s) == (0.5, [0.5, 2.0], 1.25, 3.0)


def test_tpot_divides_by_the_tokens_of_usage_not_by_the_chunks() -> None:
    assert reply([11.0, 13.0], completion_tokens=5).tpot_s == 0.5


@pytest.mark.parametrize(("arrivals", "tokens"), [([11.0, 12.0], None), ([11.0], 4), ([11.0, 12.0], 1), ([], 0)])
def test_tpot_is_none_where_no_gap_or_no_count_is_known(arrivals: list[float], tokens: int | None) -> None:
    assert reply(arrivals, tokens).tpot_s is None


def test_latencies_of_an_answer_without_tokens_are_none() -> None:
    assert (reply([]).ttft_s, reply([]).e2e_s, reply([]).itl_s) == (None, None, [])


def test_a_chunk_of_empty_text_is_an_arrival() -> None:
    assert list(collected(token(), token(""), token("", "length"), usage(3)).arrivals_s) == [1, 2, 3]


def test_an_empty_closing_chunk_beyond_the_token_count_is_no_arrival() -> None:
    assert list(collected(token(), token(), token("", "length"), usage(2)).arrivals_s) == [1, 2]


def test_the_usage_chunk_is_no_arrival_and_has_the_cached_tokens() -> None:
    stream = collected(token(), usage(1, 7, prompt_tokens_details={"cached_tokens": 4}))
    assert stream.usage == Usage(7, 1, 4)
    assert len(stream.arrivals_s) == 1


def test_of_running_usage_the_last_counts() -> None:
    stream = collected(token(usage=usage(1)["usage"]), token(usage=usage(2)["usage"]))
    assert stream.usage == Usage(3, 2)


def test_only_known_numeric_timings_are_kept() -> None:
    stream = collected(
        token(timings={"ttft_ms": 5, "predicted_ms": 7, "queue_ms": None, "itl_ms": "x", "e2e_ms": float("nan")})
    )
    assert stream.server_ms == {"ttft_ms": 5.0}


@pytest.mark.parametrize(
    ("stream", "outcome", "why"),
    [
        (collected(token(), usage(1)), Outcome.OK, ""),
        (collected(usage(0)), Outcome.OK, ""),
        (collected(token(), usage(1), done=False), Outcome.BROKEN, "without [DONE]"),
        (collected(usage(2)), Outcome.BROKEN, "no token"),
        (collected(), Outcome.BROKEN, "no token"),
        (collected(b"{"), Outcome.BROKEN, "not JSON"),
        (collected(b"\xff"), Outcome.BROKEN, "not JSON"),
        (collected(b"[1]"), Outcome.BROKEN, "not a JSON object"),
        (collected({"choices": [3]}), Outcome.BROKEN, "shape"),
        (collected({"usage": [3]}), Outcome.BROKEN, "shape"),
        (collected(token(), {"error": {"message": "boom"}}), Outcome.STREAM_ERROR, "boom"),
        (collected(token(), {"error": "boom"}, b"{", done=False), Outcome.STREAM_ERROR, "boom"),
    ],
)
def test_a_stream_is_ok_only_if_it_ended_as_it_must(stream: StreamCollector, outcome: Outcome, why: str) -> None:
    verdict, message = stream.verdict()
    assert verdict is outcome
    assert why in message
    assert stream.has_failed is (outcome not in (Outcome.OK,) and "DONE" not in why and "no token" not in why)
