import json
from typing import Any

import pytest

from loadtest.collector import ChatCollector, ResponsesCollector, StreamCollector, error_message
from loadtest.record import Outcome, Reply, Usage


def collected(*events: Any, done: bool = True, kind: type[StreamCollector] = StreamCollector) -> StreamCollector:
    """Returns a collector after these events, which arrive at 1, 2, 3, ... seconds."""
    collector = kind()
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


@pytest.mark.parametrize("body", ["Not\n  found.\n", {"error": {"message": "Not\nfound."}}, {"error": "Not found."}])
def test_an_error_is_told_in_one_line(body: Any) -> None:
    assert error_message(body) == "Not found."


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


def said(delta: Any, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def test_arrivals_of_a_chat_are_the_chunks_that_say_something() -> None:
    role, end = said({"role": "assistant", "content": ""}), said({}, "stop")
    call = said({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]})
    chat = collected(role, said({"reasoning_content": "a"}), said({"content": "b"}), call, end, kind=ChatCollector)
    assert list(chat.arrivals_s) == [2, 3, 4]
    assert chat.verdict()[0] is Outcome.OK


def test_a_chat_may_have_an_answer_without_text_but_not_be_without_an_answer() -> None:
    silent = collected(said({"role": "assistant"}), said({}, "stop"), usage(1), kind=ChatCollector)
    assert (silent.verdict(), len(silent.arrivals_s)) == ((Outcome.OK, ""), 0)
    assert collected(usage(1), kind=ChatCollector).verdict()[0] is Outcome.BROKEN


END = {"usage": {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, "timings": None}


@pytest.mark.parametrize("end", ["completed", "incomplete"])
def test_arrivals_of_a_response_are_its_deltas_and_the_last_event_has_the_usage(end: str) -> None:
    head, item = {"type": "response.created", "response": {"usage": None}}, {"type": "response.output_item.added"}
    deltas = [{"type": f"response.{name}.delta", "delta": "x"} for name in ("reasoning_text", "output_text")]
    last = {"type": f"response.{end}", "response": END}
    stream = collected(head, item, *deltas, last, done=False, kind=ResponsesCollector)
    assert (list(stream.arrivals_s), stream.usage) == ([3, 4], Usage(7, 2, 4))
    assert stream.verdict() == (Outcome.OK, "")


@pytest.mark.parametrize(
    ("events", "outcome", "why"),
    [
        ([{"type": "response.output_text.delta", "delta": "x"}], Outcome.BROKEN, "without response.completed"),
        ([{"type": "response.failed", "response": {"error": {"message": "boom"}}}], Outcome.STREAM_ERROR, "boom"),
        ([{"type": "error", "message": "boom", "code": "c"}], Outcome.STREAM_ERROR, "boom"),
        ([{"response": {}}], Outcome.BROKEN, "shape"),
    ],
)
def test_a_response_is_ok_only_if_its_last_event_says_so(events: list[Any], outcome: Outcome, why: str) -> None:
    found, message = collected(*events, kind=ResponsesCollector).verdict()
    assert (found, why in message) == (outcome, True)
