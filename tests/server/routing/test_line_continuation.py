"""Streams of lines of JSON that move between replicas are those that they would have been, wherever they are cut.
Replicas are servers over an engine without a model: what one server sends again is what another one would."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.core.errors import EngineUnavailableError
from server.routing.continuation import Events, ForeignReplicaError
from server.routing.line_continuation import LineContinuation
from server.routing.moves import ReplicaLostError
from tests.server.events import timeless
from tests.server.fake_engine import letters
from tests.server.live_server import LiveServer
from tests.server.model_talk import CALL, THOUGHT, WEATHER, saying_tokens

CHAT, GENERATE = "/api/chat", "/api/generate"
ASK: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, GENERATE: {"prompt": "Hi"}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]}
SEEDED = {"options": {"seed": 5, "num_predict": 200}}
POINT = b'{"resume_point":{"system_fingerprint":"fp","seed":5,"token_ids":[1,2],"cached":{}}}'
LINE = b'{"created_at":"first","message":{"content":"a"},"done":false}'


def ask(server: LiveServer, path: str, body: dict[str, Any]) -> list[bytes]:
    response = server.post(path, json.dumps(body), {"X-Request-Id": "one"})
    assert response.status_code == 200, response.text
    return list(Events(b"\n").split(response.content))


def moved(server: LiveServer, path: str, body: dict[str, Any], cuts: Iterator[int]) -> tuple[list[bytes], int]:
    """Returns the lines that the client gets of a stream whose n-th replica dies behind so many lines as the n-th cut
    says, and how many replicas it took."""
    stream, got = LineContinuation(body), b""
    for number in range(1, 9):
        lines = ask(server, path, stream.next_body())
        for line in lines[: next(cuts, len(lines))]:
            if (new := stream.take(line)) is not None:
                got += new + stream.separator
        if stream.is_done:
            return list(Events(b"\n").split(got)), number
    raise AssertionError


def parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    each: list[dict[str, Any]] = timeless([json.loads(line) for line in lines])
    return each


@pytest.mark.parametrize(
    ("path", "says", "fields"),
    [
        (CHAT, THOUGHT, TOOLS),
        (CHAT, CALL, TOOLS),
        (CHAT, "Ünï 😀 <tool_call no", TOOLS),
        (GENERATE, THOUGHT, {}),
        (GENERATE, THOUGHT, {"raw": True}),
        (GENERATE, THOUGHT, {"options": {"seed": 5, "num_predict": 12, "stop": ["see"]}}),
    ],
)
def test_wherever_it_is_cut_the_stream_is_the_same(
    agent: LiveServer, path: str, says: str, fields: dict[str, Any]
) -> None:
    agent.engine.rule = saying_tokens(agent, says)
    body = ASK[path] | SEEDED | fields
    expected = ask(agent, path, body)
    num_lines = len(ask(agent, path, {**body, "resume_points": True}))
    assert num_lines > len(expected)
    for first in range(1, num_lines, 5):
        got, num_replicas = moved(agent, path, body, iter((first, 9)))
        assert parsed(got) == parsed(expected), first
        assert num_replicas > 1


@pytest.mark.parametrize("path", ASK)
def test_the_tokens_so_far_are_given_and_the_seed_is_kept(agent: LiveServer, path: str) -> None:
    agent.engine.rule = letters
    stream = LineContinuation(ASK[path] | {"options": {"num_predict": 9}})
    token_ids = []
    for line in ask(agent, path, stream.next_body())[:-4]:
        stream.take(line)
        token_ids += json.loads(line).get("resume_point", {}).get("token_ids", [])
    assert stream.has_begun and not stream.is_done and len(token_ids) > 3
    ask(agent, path, stream.next_body())
    before, after = agent.engine.requests[-2:]
    assert after.given_token_ids == tuple(token_ids) and after.params == before.params
    assert list(after.prompt_token_ids) == list(before.prompt_token_ids)


@pytest.mark.parametrize("path", ASK)
def test_points_are_lines_that_only_those_get_who_ask(agent: LiveServer, path: str) -> None:
    agent.engine.rule = saying_tokens(agent, "Hello")
    body = ASK[path] | SEEDED
    plain, pointed = (ask(agent, path, {**body, "resume_points": asks}) for asks in (False, True))
    points = [json.loads(each)["resume_point"] for each in pointed if b"resume_point" in each]
    assert [each["token_ids"] for each in points] == [[letter] for letter in b"Hello"]
    assert {each["seed"] for each in points} == {5} and points[0]["system_fingerprint"].startswith("fp_")
    assert not any(b"resume_point" in each for each in [*plain, *moved(agent, path, body, iter(()))[0]])
    asking, _ = moved(agent, path, body | {"resume_points": True}, iter((9,)))
    assert sum(each.startswith(b'{"resume_point":') for each in asking) == 5


@pytest.mark.parametrize("path", ASK)
def test_points_without_a_stream_are_refused(agent: LiveServer, path: str) -> None:
    response = agent.post(path, json.dumps(ASK[path] | {"resume_points": True, "stream": False}))
    assert response.status_code == 400 and "resume_points is only allowed with stream" in response.text


@pytest.mark.parametrize("path", ASK)
def test_without_a_prompt_the_stream_is_one_line(agent: LiveServer, path: str) -> None:
    [line], num_replicas = moved(agent, path, {"keep_alive": 0}, iter(()))
    assert json.loads(line)["done_reason"] == "load" and num_replicas == 1


@pytest.mark.parametrize("path", ASK)
def test_an_engine_that_is_given_up_is_lost_and_other_failures_are_the_clients(agent: LiveServer, path: str) -> None:
    agent.engine.rule, agent.engine.fail_at = letters, 3
    got, _ = moved(agent, path, ASK[path], iter(()))
    assert "error" in json.loads(got[-1])
    agent.engine.fail_at, agent.engine.hold_at = None, 2
    with agent.client.stream("POST", path, json=ASK[path] | {"resume_points": True}) as response:
        agent.wait_until(lambda: agent.engine.num_holding > 0)
        agent.call(lambda: setattr(agent.engine, "health", EngineUnavailableError("It failed: failed.")))
        *_, point, failure = Events(b"\n").split(response.read())
    assert b"failed" in failure
    with pytest.raises(ReplicaLostError):
        LineContinuation(ASK[path]).take(point)


def test_another_kind_of_replica_does_not_go_on() -> None:
    stream = LineContinuation({})
    stream.take(LINE)
    assert stream.take(POINT) == LINE
    for other in (POINT.replace(b"fp", b"fo"), POINT.replace(b":5", b":6"), POINT.replace(b"2]", b"2,3]")):
        stream.next_body()
        with pytest.raises(ForeignReplicaError):
            stream.take(other)


def test_the_date_is_that_of_the_beginning() -> None:
    stream = LineContinuation({})
    stream.take(LINE)
    stream.take(POINT)
    stream.next_body()
    later = LINE.replace(b"first", b"later")
    assert stream.take(later) is None and stream.take(POINT) is None
    assert stream.take(later.replace(b"false", b"true")) == LINE.replace(b"false", b"true")
