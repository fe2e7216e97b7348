"""Agent sessions: what their turns send, in which order, and what is reported of them."""

import json
from itertools import islice, pairwise
from typing import Any

import pytest

from loadtest.arguments import parse_config
from loadtest.errors import UsageError
from loadtest.sessions.answer import Answer, ChatAnswer, ToolCall
from loadtest.sessions.session import session_stream
from loadtest.workload import Conversation, RequestSpec, Shape, WorkloadKind
from tests.loadtest.fake_server import FakeServer, running
from tests.loadtest.program import Capture, Run

SHAPE = Shape(WorkloadKind.AGENT_SESSIONS, 5, 7, num_turns=3, system_len=11, num_tools=2, is_text=True)
QUICK = ("--workload", "agent-sessions", "--prompt-len", "3", "--max-tokens", "2", "--system-len", "5", "--tools", "1")
QUICK += ("--turns", "3", "--think-time", "0", "--quiet")
WHOLE = ToolCall("c1", "f", "{}")


def told(spec: RequestSpec | None) -> Conversation:
    assert spec is not None and isinstance(spec.prompt, Conversation)
    return spec.prompt


def roles(conversation: Conversation) -> str:
    return " ".join(message["role"] for message in conversation.messages)


def test_a_turn_sends_all_that_was_said_before_and_one_question_more() -> None:
    session = next(session_stream(SHAPE, "1"))
    turns = [session.first_turn()]
    while (turn := session.next_turn(Answer(f"answer {len(turns)}"))) is not None:
        turns.append(turn)
    assert [(turn.turn, turn.max_tokens) for turn in turns] == [(1, 7), (2, 7), (3, 7)]
    assert roles(told(turns[-1])) == "system user assistant user assistant user"
    for before, after in pairwise(map(told, turns)):
        assert after.messages[: len(before.messages)] == before.messages
    assert told(turns[2]).messages[4]["content"] == "answer 2"
    assert [len(message["content"].split()) for message in told(turns[0]).messages] == [11, 5]


def test_sessions_share_the_system_prompt_and_the_tools_and_nothing_else() -> None:
    first, second = (told(session.first_turn()) for session in islice(session_stream(SHAPE, "1"), 2))
    assert (first.messages[0], first.tools) == (second.messages[0], second.tools)
    assert first.messages[1] != second.messages[1]
    assert len({tool["function"]["name"] for tool in first.tools}) == 2
    assert told(next(session_stream(SHAPE, "2")).first_turn()).messages[0] != first.messages[0]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((WHOLE,), "system user assistant tool"),
        ((WHOLE, ToolCall("c2", "g", "{}")), "system user assistant tool tool"),
        ((ToolCall("c1", "f", '{"a'),), "system user assistant user"),
        ((WHOLE, ToolCall("c2", "g", "3")), "system user assistant user"),
        ((ToolCall("", "f", "{}"),), "system user assistant user"),
    ],
)
def test_calls_are_answered_unless_they_were_cut(calls: tuple[ToolCall, ...], expected: str) -> None:
    session = next(session_stream(SHAPE, "1"))
    session.first_turn()
    conversation = told(session.next_turn(Answer("x", calls)))
    assert roles(conversation) == expected
    ids = [call["id"] for call in conversation.messages[2].get("tool_calls", ())]
    assert ids == [message["tool_call_id"] for message in conversation.messages[3:] if message["role"] == "tool"]


def test_a_call_is_put_together_from_its_deltas() -> None:
    answer = ChatAnswer()
    answer.add({"role": "assistant", "content": "Let me "})
    answer.add({"content": "see.", "reasoning_content": "hm"})
    answer.add({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]})
    answer.add({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]})
    answer.add({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]})
    assert answer.whole() == Answer("Let me see.", (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}")))


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
@pytest.mark.parametrize(("called_with", "who"), [(None, "user"), ('{"a": 1}', "tool"), ("{", "user")])
def test_sessions_go_on_from_the_servers_own_answers(
    endpoint: str, called_with: str | None, who: str, capsys: Capture
) -> None:
    with running(FakeServer(called_with=called_with, num_cached=4)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--endpoint", endpoint, "--sessions", "1", "--warmup", "0")
    assert (run.code, len(fake.bodies)) == (0, 3)
    last = fake.bodies[-1].get("messages") or fake.bodies[-1]["input"]
    kinds = [item.get("role") or item["type"] for item in last]
    result = ["assistant", who]
    if who == "tool" and endpoint == "responses":
        result = ["assistant", "function_call", "function_call_output"]
    assert kinds == ["system", "user", *result, *result]
    assert last[2]["content"] == (" a" if called_with and endpoint == "chat" else " a a")
    assert [turn["turn"] for turn in run.document["urls"][0]["turns"]] == [1, 2, 3]


def test_turns_are_reported_apart_with_what_was_cached(capsys: Capture) -> None:
    with running(FakeServer(num_cached=4)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--concurrency", "2", "--sessions", "4", "--strict")
    assert (run.code, run.group["requests"]["ok"], fake.peak_in_flight) == (0, 12, 2)
    turns = run.document["urls"][0]["turns"]
    assert turns == run.document["urls"][0]["rounds"][0]["turns"]
    assert [turn["requests"]["ok"] for turn in turns] == [4, 4, 4]
    assert [turn["tokens"]["prompt"] for turn in turns] == [32, 52, 72]
    assert {turn["tokens"]["cached_prompt"] for turn in turns} == {16}
    assert all(turn["ttft_ms"]["count"] == 4 for turn in turns)
    assert "turns of the sessions" in run.out and "22%" in run.out


def test_a_session_is_sequential_and_its_warm_up_shares_only_what_all_share(capsys: Capture) -> None:
    with running(FakeServer(first_token_s=0.01)) as fake:
        Run(capsys, fake.url, *QUICK, "--concurrency", "1", "--sessions", "2", "--warmup", "2")
    messages = [body["messages"] for body in fake.bodies]
    assert [len(told) for told in messages] == [2, 2, 2, 4, 6, 2, 4, 6]
    assert len({json.dumps(told[0]) for told in messages}) == 1
    assert len({json.dumps(told[1]) for told in messages}) == 4
    assert len({json.dumps(body["tools"]) for body in fake.bodies}) == 1


def test_a_turn_that_fails_ends_its_session(capsys: Capture) -> None:
    with running(FakeServer(failing_status=400, num_fine=2)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--concurrency", "2", "--warmup", "0")
    assert (run.group["requests"]["ok"], run.group["requests"]["http_error"]) == (2, 2)
    assert [turn["turn"] for turn in run.document["urls"][0]["turns"]] == [1, 2]


def test_no_turn_begins_after_the_duration(capsys: Capture) -> None:
    with running(FakeServer(first_token_s=0.02)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--duration", "0.3", "--think-time", "0.01", "--concurrency", "2")
        thoughtful = Run(capsys, fake.url, *QUICK, "--duration", "0.1", "--think-time", "1e6", "--concurrency", "2")
    assert run.group["requests"]["ok"] >= 2
    assert thoughtful.group["requests"]["ok"] == 2


def schedule_of(*flags: str) -> Any:
    return parse_config(["http://a", "--workload", "agent-sessions", *flags]).schedule


def test_each_stream_has_one_session_by_default() -> None:
    each, few, timed = schedule_of("--concurrency", "3"), schedule_of("--sessions", "5"), schedule_of("--duration", "5")
    assert [schedule.num_sessions for schedule in (each, few, timed)] == [3, 5, None]
    assert [schedule.num_requests for schedule in (each, few, timed)] == [24, 40, None]


@pytest.mark.parametrize(
    "flags",
    [
        ("--turns", "3"),
        ("--tools", "0"),
        ("--workload", "agent-sessions", "--requests", "3"),
        ("--workload", "agent-sessions", "--rate", "3"),
        ("--workload", "agent-sessions", "--endpoint", "completions"),
        ("--workload", "agent-sessions", "--prefix-len", "3"),
    ],
)
def test_flags_that_do_not_go_with_sessions_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        parse_config(["http://a", *flags])


def test_sessions_that_are_too_few_are_warned_of(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK, "--concurrency", "3", "--sessions", "1")
    assert run.document["warnings"] == ["A: only 1 of the 3 streams had a request (--sessions)"]
