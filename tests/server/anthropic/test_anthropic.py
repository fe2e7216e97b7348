"""/v1/messages: the answers, whole and streamed."""

from pathlib import Path
from typing import Any

import pytest

from engine.core.request import FinishReason
from server.anthropic.writer import _make_block
from server.protocol.anthropic import MessageAnswer
from server.tools.message_parts import ToolCall
from tests.server.events import typed_events_of
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_TOOLS as TOOLS
from tests.server.model_talk import CALL, THOUGHT, saying_tokens

GOLDEN = Path(__file__).parents[1] / "golden"


def test_an_answer_is_a_message(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    response = server.message()
    body = response.json()
    assert (body["type"], body["role"], body["content"]) == (
        "message",
        "assistant",
        [{"type": "text", "text": "Hello"}],
    )
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == 6 == int(response.headers["X-Generated-Tokens"])
    assert response.headers["request-id"] == response.headers["x-request-id"] == body["id"].removeprefix("msg_")
    assert body["timings"]["ttft_ms"] == 3.0


@pytest.mark.parametrize(
    ("output", "parameters", "reason", "stop"),
    [
        ("Hello", {"max_tokens": 2}, "max_tokens", None),
        ("Hello", {"stop_sequences": ["l"]}, "stop_sequence", "l"),
        ("Hello", {"stop_token_ids": [ord("l")]}, "end_turn", None),
        (CALL, {"tools": TOOLS, "max_tokens": 99}, "tool_use", None),
        (CALL, {"tools": TOOLS, "max_tokens": 99, "stop_token_ids": [ord("Z")]}, "end_turn", None),
        (CALL, {"tools": TOOLS, "max_tokens": 40}, "max_tokens", None),
    ],
)
def test_the_stop_reason_is_reported(
    agent: LiveServer, output: str, parameters: dict[str, Any], reason: str, stop: str | None
) -> None:
    agent.engine.rule = saying_tokens(agent, output)
    whole = agent.message(**parameters).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    *_, delta, end = typed_events_of(agent.message(stream=True, **parameters))
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": stop} and end == {"type": "message_stop"}


@pytest.mark.parametrize(("room", "reason"), [(12, "model_context_window_exceeded"), (16, "max_tokens")])
def test_max_tokens_is_a_bound_that_the_context_may_come_before(server: LiveServer, room: int, reason: str) -> None:
    messages = "x" * 100
    server.message(messages)
    num_template_tokens = len(server.engine.requests[-1].prompt_token_ids) - len(messages)
    messages = "x" * (server.engine.info.max_model_len - num_template_tokens - room)
    answer = server.message(messages, max_tokens=16).json()
    assert (answer["usage"]["output_tokens"], answer["stop_reason"]) == (room, reason)
    *_, delta, _ = typed_events_of(server.message(messages, max_tokens=16, stream=True))
    assert delta["delta"]["stop_reason"] == reason


def test_an_answer_that_ends_by_itself_is_none_that_the_context_cut(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    assert server.message(max_tokens=64000).json()["stop_reason"] == "end_turn"


def test_a_prompt_that_is_cut_to_fit_leaves_room_for_all_tokens(server: LiveServer) -> None:
    cut = server.message("x" * 600, max_tokens=500, truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["input_tokens"] == 12 and cut.json()["stop_reason"] == "max_tokens"
    assert server.message("x" * 600, max_tokens=512, truncate_prompt_tokens=-1).status_code == 400


def test_thinking_that_is_omitted_is_not_told(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    asked: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 200}
    whole = agent.message(**asked).json()
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert whole["content"][1]["text"].startswith("Let me see.") and whole["usage"]["output_tokens"] > 100
    streamed = agent.message(stream=True, **asked)
    assert "thinking_delta" not in streamed.text and "Let me" in "".join(
        event["delta"].get("text", "") for event in typed_events_of(streamed) if event["type"] == "content_block_delta"
    )


def test_an_empty_answer_has_no_blocks(server: LiveServer) -> None:
    server.engine.rule = saying("")
    assert server.message().json()["content"] == []
    kinds = [event["type"] for event in typed_events_of(server.message(stream=True))]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_cached_tokens_are_counted_separately(server: LiveServer) -> None:
    server.engine.num_cached_tokens = 16
    whole = server.message(max_tokens=1).json()["usage"]
    assert whole["cache_read_input_tokens"] == 16
    assert whole["input_tokens"] == len(server.engine.requests[-1].prompt_token_ids) - 16
    begin, *_ = typed_events_of(server.message(max_tokens=1, stream=True))
    assert begin["message"]["usage"] == whole


def test_thinking_text_and_calls_are_blocks(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    thinking, text, *calls = agent.message(tools=TOOLS, max_tokens=200).json()["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["name"], call["input"]) for call in calls] == [("get_weather", {"city": "Zürich"}), ("get_time", {})]
    assert len({call["id"] for call in calls}) == 2


def test_a_tool_may_have_the_long_name_that_anthropic_allows(agent: LiveServer) -> None:
    name = "mcp__".ljust(128, "x")
    agent.engine.rule = saying_tokens(agent, CALL.replace("get_weather", name))
    [call] = agent.message(tools=[{**TOOLS[0], "name": name}], max_tokens=200).json()["content"]
    assert (call["name"], call["input"]) == (name, {"city": "Zürich"})


def test_a_call_that_is_cut_has_no_input(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, CALL)
    [call] = agent.message(tools=TOOLS, max_tokens=50).json()["content"]
    assert (call["name"], call["input"]) == ("get_weather", {})


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", r'"\ud800"', r'{"\ud800": 1}'])
def test_a_call_that_json_cannot_hold_has_no_input(agent: LiveServer, value: str) -> None:
    agent.engine.rule = saying_tokens(agent, CALL.replace('"Zürich"', value))
    [call] = agent.message(tools=TOOLS, max_tokens=99).json()["content"]
    assert (call["name"], call["input"]) == ("get_weather", {})


@pytest.mark.parametrize("arguments", ['{"a": ' + "[" * 900 + "]" * 900 + "}", '{"a": ' + "9" * 5000 + "}", "[1]"])
def test_a_call_that_no_client_could_read_has_no_input(arguments: str) -> None:
    call = ToolCall(0, arguments, "1", "f")
    block = _make_block(True, 0, call)
    block.add(call)
    assert block.whole()["input"] == {}


@pytest.mark.parametrize("limit", [200, 3, 12, 60])
def test_a_stream_adds_up_to_what_a_whole_message_is(agent: LiveServer, limit: int) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    asked: dict[str, Any] = {"tools": TOOLS, "seed": 1, "max_tokens": limit, "headers": {"X-Request-Id": "same"}}
    begin, *events, delta, _ = typed_events_of(agent.message(stream=True, **asked))
    whole = agent.message(**asked).json()
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == [block["type"] for block in whole["content"]]
    for index, block in enumerate(whole["content"]):
        deltas = [each["delta"] for each in events if each["index"] == index and "delta" in each]
        written = "".join(each.get("text", each.get("thinking", each.get("partial_json"))) for each in deltas)
        assert (
            written == block.get("text", block.get("thinking", written)) and events[-1]["type"] == "content_block_stop"
        )
    assert delta["usage"] == whole["usage"] and delta["timings"] == whole["timings"]
    assert begin["message"]["id"] == whole["id"] and begin["message"]["seed"] == whole["seed"] == 1


def test_an_idle_stream_is_kept_alive_by_pings(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.generation.sse.PING_S", 0.02)
    monkeypatch.setattr("server.generation.sse.IDLE_S", 0.01)
    server.engine.delay_s = 0.1
    events = typed_events_of(server.message(stream=True, max_tokens=3))
    assert {"type": "ping"} in events and events[-1] == {"type": "message_stop"}


def test_an_error_in_a_stream_is_an_event(server: LiveServer) -> None:
    server.engine.fail_at = 2
    *_, last = typed_events_of(server.message(stream=True))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in last["error"]["message"] and last["request_id"] in last["error"]["message"]


@pytest.mark.parametrize(
    ("name", "output", "parameters"),
    [
        ("plain", 'a\u2028é\x85"\n', {}),
        ("empty", "", {}),
        ("stopped", "Hello", {"stop_sequences": ["l"], "system": "Be brief."}),
        ("tools", THOUGHT, {"tools": TOOLS, "max_tokens": 200}),
    ],
)
def test_the_bytes_of_a_stream_are_as_they_were(
    agent: LiveServer, name: str, output: str, parameters: dict[str, Any]
) -> None:
    """A difference is a change for every client: rewrite the golden file only when that is meant."""
    agent.engine.rule = saying_tokens(agent, output)
    assert golden(agent, **parameters) == (GOLDEN / f"message_{name}.sse").read_bytes()


def test_the_bytes_after_an_error_are_as_they_were(agent: LiveServer) -> None:
    agent.engine.fail_at = 1
    assert golden(agent) == (GOLDEN / "message_error.sse").read_bytes()


def golden(server: LiveServer, **parameters: Any) -> bytes:
    return server.message(stream=True, seed=1, headers={"X-Request-Id": "golden"}, **parameters).content


def test_answers_are_as_documented(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    body = agent.message(tools=TOOLS, max_tokens=200).json()
    assert MessageAnswer.model_validate(body).model_dump(exclude_unset=True) == body


def test_a_client_that_leaves_a_stream_aborts_it(server: LiveServer) -> None:
    server.engine.hold_at = 3
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "stream": True}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        assert next(response.iter_bytes()).startswith(b"event: message_start\n")
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT]
