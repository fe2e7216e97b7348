"""A stream that moves between replicas is the stream that it would have been, wherever it is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.routing.continuation import (
    DONE,
    Events,
    ForeignReplicaError,
    StreamContinuation,
    error_event,
)
from server.routing.moves import ReplicaLostError

HEAD = {"id": "cmpl-1", "created": 10, "model": "m", "system_fingerprint": "fp", "seed": 5}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({**HEAD, **fields}).encode()


def answer(index: int, num_tokens: int, given: list[int]) -> list[dict[str, Any]]:
    """Returns a choice's chunks as a replica sends them: what it was given in one piece, then token by token."""
    token_ids = [100 * index + each for each in range(num_tokens)]
    assert given == token_ids[: len(given)]
    pieces = [given, *([each] for each in token_ids[len(given) :])] if given else [[each] for each in token_ids]
    chunks = [
        {"index": index, "text": "".join(f"<{each}>" for each in piece), "token_ids": piece, "finish_reason": None}
        for piece in pieces
    ]
    return [*chunks[:-1], chunks[-1] | {"finish_reason": "length"}]


def stream(body: dict[str, Any], lengths: list[int], created: int) -> list[bytes]:
    """Returns the events of a replica that is asked for answers of these lengths, choice after choice in turns."""
    assert body["return_token_ids"] is True
    given = body.get("resume_token_ids", [])
    choices = [answer(index, length, [*given, *[[]] * 9][index]) for index, length in enumerate(lengths)]
    turns = [each.pop(0) for _ in range(99) for each in choices if each]
    return [event(choices=[each], created=created) for each in turns] + [event(choices=[], created=created), DONE]


def read(events: list[bytes]) -> tuple[dict[int, str], dict[int, list[int]]]:
    """Returns the text and the tokens of each choice."""
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    for each in events:
        for choice in json.loads(each[6:])["choices"] if each != DONE else ():
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            token_ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    return texts, token_ids


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 9), max_size=4),
    logprobs=st.sampled_from([None, 0, 1]),
)
def test_wherever_it_is_cut_nothing_is_lost_or_said_twice(
    lengths: list[int], cuts: list[int], logprobs: int | None
) -> None:
    body = {"stream": True, "return_token_ids": True, "logprobs": logprobs}
    continuation = StreamContinuation(body)
    got: list[bytes] = []
    for attempt, cut in enumerate([*cuts, 999]):
        sent = continuation.next_body()
        assert logprobs is None or "resume_token_ids" not in sent
        for each in stream(sent, lengths, created=10 + attempt)[:cut]:
            if (new := continuation.take(each)) is not None:
                got.append(new)
        if continuation.is_done:
            break
    expected = read(stream(body, lengths, created=10))
    assert read(got) == expected
    assert got[-1] == DONE and len({json.loads(each[6:])["created"] for each in got[:-1]}) == 1
    ends = [json.loads(each[6:])["choices"][0]["finish_reason"] for each in got[:-1] if b'"choices":[]' not in each]
    assert sum(b'"choices":[]' in each for each in got) == 1, "usage is sent once"
    assert ends.count("length") == len(lengths)


def test_the_seed_that_was_drawn_is_kept() -> None:
    continuation = StreamContinuation({"stream": True})
    assert "seed" not in continuation.next_body() and not continuation.has_begun
    continuation.take(event(choices=[{"index": 0, "text": "a", "token_ids": [1]}]))
    assert continuation.next_body()["seed"] == 5 and continuation.has_begun


def test_clients_that_asked_for_no_token_ids_get_none() -> None:
    continuation = StreamContinuation({"stream": True})
    choice = {"index": 0, "text": "\u00e9", "token_ids": [1], "prompt_token_ids": [2]}
    sent = continuation.take(event(choices=[choice], prompt_token_ids=[2]))
    assert sent is not None and b"token_ids" not in sent
    assert sent == event(choices=[{"index": 0, "text": "\u00e9"}]).replace(b": ", b":").replace(b", ", b",").replace(
        b"data:", b"data: "
    )


def test_the_last_chunk_may_have_a_finish_reason_and_nothing_else() -> None:
    """Those of chats have."""
    continuation = StreamContinuation({"stream": True})
    continuation.take(event(choices=[{"index": 0, "delta": {"content": "a"}, "token_ids": [1]}]))
    continuation.next_body()
    assert continuation.take(event(choices=[{"index": 0, "delta": {"content": "a"}, "token_ids": [1]}])) is None
    assert continuation.take(event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])) is not None
    assert continuation.take(event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])) is None


@pytest.mark.parametrize("name", ["model", "system_fingerprint", "seed"])
def test_another_kind_of_replica_does_not_go_on(name: str) -> None:
    continuation = StreamContinuation({"stream": True})
    continuation.take(event(choices=[]))
    with pytest.raises(ForeignReplicaError):
        continuation.take(event(choices=[], **{name: "other"}))


def test_a_server_that_stops_counts_as_lost_and_other_errors_are_the_clients() -> None:
    continuation = StreamContinuation({"stream": True})
    with pytest.raises(ReplicaLostError):
        continuation.take(b'data: {"error": {"code": "server_is_overloaded"}}')
    other = b'data: {"error": {"code": "internal_error"}}'
    assert continuation.take(other) == other
    assert continuation.take(b": comment") == b": comment"


@given(cuts=st.lists(st.integers(0, 30), max_size=5))
def test_events_are_found_however_bytes_arrive(cuts: list[int]) -> None:
    data = b"data: a\n\n: b\n\ndata: c\ndata: d\n\n"
    bounds = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    events = Events()
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    found = [each for piece in pieces for each in events.split(piece)]
    assert found == [b"data: a", b": b", b"data: c\ndata: d"]


def test_an_error_of_lines_is_a_line() -> None:
    assert json.loads(error_event("/api/chat", "gone")) == {"error": "gone"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
def test_errors_are_written_as_each_api_does(path: str) -> None:
    data = next(line for line in error_event(path, "gone").split(b"\n") if line.startswith(b"data: "))
    assert "gone" in json.dumps(json.loads(data[6:]))


def test_a_choice_that_has_ended_is_computed_anew_so_that_it_ends_again() -> None:
    """Behind its last token another would follow, and count."""
    continuation = StreamContinuation({"stream": True, "n": 2})
    continuation.take(event(choices=[{"index": 0, "text": "a", "token_ids": [1], "finish_reason": "stop"}]))
    continuation.take(event(choices=[{"index": 1, "text": "b", "token_ids": [2]}]))
    assert continuation.next_body()["resume_token_ids"] == [[], [2]]


def usage(num_tokens: int, cached: int) -> dict[str, Any]:
    return {"usage": {"completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": cached}}}


@pytest.mark.parametrize("is_continuous", [False, True])
def test_usage_tells_what_was_cached_when_the_stream_began(is_continuous: bool) -> None:
    options = {"include_usage": True} | ({"continuous_usage_stats": True} if is_continuous else {})
    continuation = StreamContinuation({"stream": True, "stream_options": options})
    sent = []
    for cached in (3, 7):
        assert continuation.next_body()["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        choices = [{"index": 0, "text": "a", "token_ids": [1]}]
        sent.append(continuation.take(event(choices=choices, **usage(1, cached))))
    sent.append(continuation.take(event(choices=[{"index": 0, "text": "b", "token_ids": [2]}], **usage(2, 7))))
    sent.append(continuation.take(event(choices=[], **usage(2, 7))))
    told = [json.loads(each[6:])["usage"] for each in sent if each is not None]
    assert told[-1] == usage(2, 3)["usage"]
    assert told[:-1] == ([usage(1, 3)["usage"], usage(2, 3)["usage"]] if is_continuous else [None, None])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, "wrong"])
def test_usage_that_nobody_gets_is_not_asked_for(options: Any) -> None:
    body = {"stream": True, "stream_options": options}
    assert StreamContinuation(body).next_body()["stream_options"] == options
