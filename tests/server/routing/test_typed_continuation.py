"""Streams of Responses and Messages that move between replicas are those that they would have been, wherever they are
cut. Replicas are servers over an engine without a model: what one server sends again is what another one would."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.core.errors import EngineUnavailableError
from server.routing.continuation import Events, ForeignReplicaError
from server.routing.moves import ReplicaLostError
from server.routing.typed_continuation import TypedContinuation
from tests.server.events import timeless, typed_events_of
from tests.server.fake_engine import letters
from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_TOOLS, RESPONSES_TOOLS, THOUGHT, saying_tokens

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HEADERS = {"X-Request-Id": "one"}
ASK = {RESPONSES: {"input": "Hi", "max_output_tokens": 200}}
ASK[MESSAGES] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
TOOLS = {RESPONSES: {"tools": RESPONSES_TOOLS}, MESSAGES: {"tools": ANTHROPIC_TOOLS}}
CUSTOM = {"tools": [{"type": "custom", "name": "write"}]}
WRITTEN = '<tool_call>{"name": "write", "arguments": {"input": "a\\"\\u00e9\\ud83d\\ude00\\nb"}}</tool_call>'
SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def ask(server: LiveServer, path: str, body: dict[str, Any]) -> bytes:
    response = server.post(path, json.dumps(body), HEADERS)
    assert response.status_code == 200, response.text
    return response.content


def parsed(data: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = timeless(typed_events_of(httpx.Response(200, content=data)))
    return events


def moved(server: LiveServer, path: str, body: dict[str, Any], cuts: Iterator[int]) -> tuple[bytes, int]:
    """Returns what the client gets of a stream whose n-th replica dies behind so many events and points as the n-th cut
    says, and how many replicas it took."""
    stream, got = TypedContinuation(body), b""
    for number in itertools.count(1):
        server.engine.num_cached_tokens = 7 if stream.has_begun else 3
        events = list(Events().split(ask(server, path, stream.next_body())))
        for event in events[: next(cuts, len(events))]:
            if (new := stream.take(event)) is not None:
                got += new + b"\n\n"
        if stream.is_done:
            return got, number
    raise AssertionError


CASES = [
    *((path, THOUGHT, TOOLS[path]) for path in ASK),
    *((path, "Ünï 😀 <tool_call no", TOOLS[path]) for path in ASK),
    (MESSAGES, THOUGHT, TOOLS[MESSAGES] | {"thinking": {"type": "adaptive", "display": "omitted"}}),
    (
        MESSAGES,
        THOUGHT,
        {
            "stop_sequences": ["see"],
            "system": [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}],
        },
    ),
    (RESPONSES, WRITTEN, CUSTOM),
    (RESPONSES, "<think>Hm.</think>Let", SCORED),
    (RESPONSES, THOUGHT, TOOLS[RESPONSES] | {"max_output_tokens": 45}),
]


@pytest.mark.parametrize(("path", "says", "fields"), CASES)
def test_wherever_it_is_cut_the_stream_is_the_same(
    agent: LiveServer, path: str, says: str, fields: dict[str, Any]
) -> None:
    agent.engine.rule = saying_tokens(agent, says)
    agent.engine.num_cached_tokens = 3
    body = ASK[path] | fields | {"stream": True, "seed": 5}
    expected = parsed(ask(agent, path, body))
    num_events = len(list(Events().split(ask(agent, path, {**body, "resume_points": True}))))
    assert num_events > len(expected)
    for first in range(1, num_events, 5):
        got, num_replicas = moved(agent, path, body, iter((first, 9)))
        assert parsed(got) == expected, first
        assert num_replicas > 1


@pytest.mark.parametrize("path", ASK)
def test_the_tokens_so_far_are_given_and_the_seed_is_kept(agent: LiveServer, path: str) -> None:
    agent.engine.rule = letters
    body = ASK[path] | {"stream": True, "max_tokens" if path == MESSAGES else "max_output_tokens": 9}
    stream = TypedContinuation(body)
    events = list(Events().split(ask(agent, path, stream.next_body())))
    token_ids = []
    for event in events[:-4]:
        stream.take(event)
        if event.startswith(b": {"):
            token_ids += json.loads(event[2:])["token_ids"]
    assert stream.has_begun and not stream.is_done and len(token_ids) > 3
    ask(agent, path, stream.next_body())
    before, after = agent.engine.requests[-2:]
    assert after.given_token_ids == tuple(token_ids) and after.params.seed == before.params.seed
    assert list(after.prompt_token_ids) == list(before.prompt_token_ids)


@pytest.mark.parametrize("path", ASK)
def test_points_are_comments_that_only_those_get_who_ask(agent: LiveServer, path: str) -> None:
    agent.engine.rule = saying_tokens(agent, "Hello")
    body = ASK[path] | {"stream": True, "seed": 3}
    plain, pointed = (ask(agent, path, {**body, "resume_points": asks}) for asks in (False, True))
    comments = [each for each in pointed.split(b"\n\n") if each.startswith(b":")]
    assert b"\n:" not in plain and not plain.startswith(b":")
    points = [json.loads(each[2:]) for each in comments]
    assert [each["token_ids"] for each in points] == [[letter] for letter in b"Hello"]
    assert {each["seed"] for each in points} == {3} and points[0]["system_fingerprint"].startswith("fp_")
    assert moved(agent, path, body, iter(()))[0].count(b"\n: {") == 0
    assert moved(agent, path, body | {"resume_points": True}, iter((9,)))[0].count(b"\n: {") == 5


@pytest.mark.parametrize("path", ASK)
def test_points_without_a_stream_are_refused(agent: LiveServer, path: str) -> None:
    response = agent.post(path, json.dumps(ASK[path] | {"resume_points": True}))
    assert response.status_code == 400 and "resume_points is only allowed with stream" in response.text


@pytest.mark.parametrize("path", ASK)
def test_a_server_that_stops_counts_as_lost_and_other_failures_are_the_clients(agent: LiveServer, path: str) -> None:
    agent.engine.rule, agent.engine.fail_at = letters, 3
    body = ASK[path] | {"stream": True}
    got, _ = moved(agent, path, body, iter(()))
    assert parsed(got)[-1]["type"] in ("response.failed", "error")
    stream = TypedContinuation(body)
    with pytest.raises(ReplicaLostError):
        stream.take(b': {"error":"server_is_overloaded"}')


@pytest.mark.parametrize("path", ASK)
def test_an_engine_that_is_given_up_is_told_before_the_failure(agent: LiveServer, path: str) -> None:
    agent.engine.rule, agent.engine.hold_at = letters, 2
    with agent.client.stream("POST", path, json=ASK[path] | {"stream": True, "resume_points": True}) as response:
        agent.wait_until(lambda: agent.engine.num_holding > 0)
        agent.call(lambda: setattr(agent.engine, "health", EngineUnavailableError("It failed: failed.")))
        *_, comment, failure, rest = response.read().split(b"\n\n")
    assert json.loads(comment[2:]) == {"error": "server_is_overloaded"} and b"failed" in failure and not rest


def test_another_kind_of_replica_does_not_go_on() -> None:
    point = b': {"system_fingerprint":"fp","seed":5,"token_ids":[1,2],"cached":{}}'
    stream = TypedContinuation({"stream": True})
    stream.take(b'event: message_start\ndata: {"type":"message_start"}')
    assert stream.take(point) is not None
    for other in (point.replace(b"fp", b"fo"), point.replace(b"5", b"6"), point.replace(b"2]", b"2,3]")):
        stream.next_body()
        with pytest.raises(ForeignReplicaError):
            stream.take(other)


def test_the_date_is_that_of_the_beginning() -> None:
    def created(kind: str, at: int) -> bytes:
        return f'event: {kind}\ndata: {{"type":"{kind}","response":{{"created_at":{at}}}}}'.encode()

    stream = TypedContinuation({"stream": True})
    stream.take(created("response.created", 1))
    stream.take(b': {"seed":5,"token_ids":[1],"cached":{}}')
    stream.next_body()
    stream.take(created("response.created", 2))
    assert stream.take(b': {"seed":5,"token_ids":[1],"cached":{}}') is None
    assert stream.take(created("response.completed", 2)) == created("response.completed", 1)


def test_keep_alives_wait_for_nothing() -> None:
    stream = TypedContinuation({"stream": True})
    ping = b'event: ping\ndata: {"type":"ping"}'
    assert stream.take(ping) == ping and stream.take(b": keep-alive") == b": keep-alive"
    assert not stream.has_begun and not stream.is_done
