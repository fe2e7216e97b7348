"""/v1/messages: what is asked of the model, what clients are told, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.request import FinishReason
from server.anthropic.writer import _make_block
from server.chat.parts import ToolCall
from server.protocol.anthropic import MessageAnswer
from tests.server.events import anthropic_error_of, typed_events_of
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import CALL, THOUGHT, WEATHER, prompt_of, saying_tokens

GOLDEN = Path(__file__).parent / "golden"
TOOLS = [{"name": "get_weather", "input_schema": WEATHER}, {"name": "get_time", "input_schema": {"type": "object"}}]


def turns_of(server: LiveServer) -> list[str]:
    return prompt_of(server).split("[")[1:]


# What clients are told.


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
    ("says", "parameters", "reason", "stop"),
    [
        ("Hello", {"max_tokens": 2}, "max_tokens", None),
        ("Hello", {"stop_sequences": ["l"]}, "stop_sequence", "l"),
        ("Hello", {"stop_token_ids": [ord("l")]}, "end_turn", None),
        (CALL, {"tools": TOOLS, "max_tokens": 99}, "tool_use", None),
        (CALL, {"tools": TOOLS, "max_tokens": 99, "stop_token_ids": [ord("Z")]}, "end_turn", None),
        (CALL, {"tools": TOOLS, "max_tokens": 40}, "max_tokens", None),
    ],
)
def test_the_reason_of_the_end_is_told(
    agent: LiveServer, says: str, parameters: dict[str, Any], reason: str, stop: str | None
) -> None:
    agent.engine.rule = saying_tokens(agent, says)
    whole = agent.message(**parameters).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    *_, delta, end = typed_events_of(agent.message(stream=True, **parameters))
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": stop} and end == {"type": "message_stop"}


def test_an_empty_answer_has_no_blocks(server: LiveServer) -> None:
    server.engine.rule = saying("")
    assert server.message().json()["content"] == []
    kinds = [event["type"] for event in typed_events_of(server.message(stream=True))]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_cached_tokens_are_told_apart(server: LiveServer) -> None:
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


def test_a_call_that_is_cut_has_no_input(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, CALL)
    [call] = agent.message(tools=TOOLS, max_tokens=50).json()["content"]
    assert (call["name"], call["input"]) == ("get_weather", {})


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", r'"\ud800"', r'{"\ud800": 1}'])
def test_a_call_that_json_cannot_tell_has_no_input(agent: LiveServer, value: str) -> None:
    agent.engine.rule = saying_tokens(agent, CALL.replace('"Zürich"', value))
    [call] = agent.message(tools=TOOLS, max_tokens=99).json()["content"]
    assert (call["name"], call["input"]) == ("get_weather", {})


@pytest.mark.parametrize("arguments", ['{"a": ' + "[" * 900 + "]" * 900 + "}", '{"a": ' + "9" * 5000 + "}", "[1]"])
def test_a_call_that_no_client_could_read_has_no_input(arguments: str) -> None:
    call = ToolCall(0, arguments, "1", "f")
    block = _make_block(0, call)
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
        told = "".join(each.get("text", each.get("thinking", each.get("partial_json"))) for each in deltas)
        assert told == block.get("text", block.get("thinking", told)) and events[-1]["type"] == "content_block_stop"
    assert delta["usage"] == whole["usage"] and delta["timings"] == whole["timings"]
    assert begin["message"]["id"] == whole["id"] and begin["message"]["seed"] == whole["seed"] == 1


def test_an_idle_stream_is_kept_alive_by_pings(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.sse.PING_S", 0.02)
    monkeypatch.setattr("server.sse.IDLE_S", 0.01)
    server.engine.delay_s = 0.1
    events = typed_events_of(server.message(stream=True, max_tokens=3))
    assert {"type": "ping"} in events and events[-1] == {"type": "message_stop"}


def test_an_error_in_a_stream_is_an_event(server: LiveServer) -> None:
    server.engine.fail_at = 2
    *_, last = typed_events_of(server.message(stream=True))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in last["error"]["message"] and last["request_id"] in last["error"]["message"]


@pytest.mark.parametrize(
    ("name", "says", "parameters"),
    [
        ("plain", 'a\u2028é\x85"\n', {}),
        ("empty", "", {}),
        ("stopped", "Hello", {"stop_sequences": ["l"], "system": "Be brief."}),
        ("tools", THOUGHT, {"tools": TOOLS, "max_tokens": 200}),
    ],
)
def test_the_bytes_of_a_stream_are_as_they_were(
    agent: LiveServer, name: str, says: str, parameters: dict[str, Any]
) -> None:
    """A difference is a change for every client: rewrite the golden file only when that is meant."""
    agent.engine.rule = saying_tokens(agent, says)
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


def test_who_leaves_a_stream_aborts(server: LiveServer) -> None:
    server.engine.hold_at = 3
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "stream": True}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        assert next(response.iter_bytes()).startswith(b"event: message_start\n")
    server.wait_until_idle()
    assert server.engine.finished == [FinishReason.ABORT]


# What is asked of the model.


def test_blocks_become_messages(agent: LiveServer) -> None:
    agent.message(
        [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Well."},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "2", "content": "gone", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "3"},
                    {"type": "text", "text": "And?"},
                ],
            },
            {"role": "system", "content": "Stop."},
        ],
        system=[{"type": "text", "text": "Be brief."}],
    )
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    assert turns_of(agent) == [
        "system]Be brief.",
        "user]Hi",
        f"assistant](Hm.)Well.{call}",
        "tool]one",
        "tool]Error: gone",
        "tool]",
        "user]And?",
        "system]Stop.",
        "assistant]",
    ]


def test_its_own_answer_can_be_sent_back(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    content = agent.message(tools=TOOLS, max_tokens=200).json()["content"]
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "7"} for each in content[2:]]
    hi = {"role": "user", "content": "Hi"}
    agent.message([hi, {"role": "assistant", "content": content}, {"role": "user", "content": results}])
    assert "(Hm.)Let me see.<tool_call>" in prompt_of(agent) and prompt_of(agent).endswith("[tool]7[tool]7[assistant]")


def test_an_answer_that_is_begun_is_continued(agent: LiveServer) -> None:
    agent.message([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}])
    assert turns_of(agent) == ["user]Hi", "assistant]Well, "]


def test_parameters_reach_the_engine(server: LiveServer) -> None:
    server.message(
        max_tokens=7, temperature=0.5, top_p=0.5, top_k=3, seed=5, stop_sequences=["x"], metadata={"user_id": "me"}
    )
    params = server.engine.requests[-1].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (7, 0.5, 0.5, 3, 5)
    assert params.stop == ("x",)


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        (None, None),
        ({"type": "adaptive"}, None),
        ({"type": "enabled", "budget_tokens": 9}, 9),
        ({"type": "disabled"}, 0),
    ],
)
def test_thinking_is_bounded(agent: LiveServer, thinking: dict[str, Any] | None, budget: int | None) -> None:
    agent.message(thinking=thinking)
    bound = agent.engine.requests[-1].params.thinking
    assert (None if bound is None else bound.max_tokens) == budget


def test_a_model_that_does_not_think_need_not_be_stopped(server: LiveServer) -> None:
    server.message(thinking={"type": "disabled"})
    assert server.engine.requests[-1].params.thinking is None


@pytest.mark.parametrize(("kind", "enabled"), [("enabled", True), ("disabled", False), ("adaptive", None)])
def test_templates_are_told_whether_to_think(kind: str, enabled: bool | None) -> None:
    template = "{{ enable_thinking if enable_thinking is defined else None }}<think>{{ messages }}"
    marks = {"<think>": 0xFA, "</think>": 0xFB}
    with live_server(FakeBackend(chat_templates={"default": template}, special_tokens=marks)) as server:
        budget = {"budget_tokens": 9} if kind == "enabled" else {}
        server.message(thinking={"type": kind, **budget})
        assert prompt_of(server).startswith(f"{enabled}<think>")


def test_a_text_format_is_followed(server: LiveServer) -> None:
    server.engine.rule = saying("{}")
    server.message(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert server.engine.requests[-1].params.grammar is not None


@pytest.mark.parametrize(
    ("choice", "is_told"), [({"type": "auto"}, True), ({"type": "none"}, False), (None, True)]
)  # fmt: skip
def test_tools_are_told_to_the_model(agent: LiveServer, choice: dict[str, Any] | None, is_told: bool) -> None:
    agent.message(tools=TOOLS, tool_choice=choice)
    assert ('"name": "get_weather"' in prompt_of(agent)) == is_told


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
def test_calls_can_be_required(server: LiveServer, choice: dict[str, Any]) -> None:
    server.message(tools=TOOLS[1:], tool_choice=choice)
    assert server.engine.requests[-1].params.grammar is not None


def test_one_call_at_a_time_can_be_asked_for(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    content = agent.message(tools=TOOLS, tool_choice=choice, max_tokens=200).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]


def test_tokens_are_counted_as_they_are_for_a_message(agent: LiveServer) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "tools": TOOLS, "thinking": {"type": "disabled"}}
    messages = [{"role": "user", "content": "Hi"}]
    counted = agent.client.post("/v1/messages/count_tokens", json={"messages": messages, **fields})
    usage = agent.message(messages, **fields).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"]} and len(agent.engine.requests) == 1
    cut = {"messages": messages, **fields, "truncate_prompt_tokens": 3}
    assert agent.client.post("/v1/messages/count_tokens", json=cut).json() == {"input_tokens": 3}
    assert agent.client.post("/v1/messages", json={**cut, "max_tokens": 1}).json()["usage"]["input_tokens"] == 3


# What is refused.

IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0: 'document'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0: 'tool_use'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "'redacted_thinking'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "So "}, USE]}]}, "messages cannot"),
        ({"system": [IMAGE]}, "system.0: 'image'"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences must not"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: 'bash_20250124'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "stop"}}, "tool_choice.name is 'stop', which"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs must not contain 'messages'"),
        ({"messages": [{"role": "assistant", "content": 129 * [USE]}]}, "messages: tool_use blocks of a turn: List"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens: this model does not think"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "adaptive", "budget": 9}}, "thinking"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_calls": True}},
            "tool_choice.disable_",
        ),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"formatt": {}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "strict": True}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n "),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: LiveServer, parameters: dict[str, Any], place: str) -> None:
    response = server.message(**({"messages": [{"role": "user", "content": "Hi"}]} | parameters))
    error = anthropic_error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert place in error["message"] and server.engine.requests == []


@pytest.mark.parametrize(
    ("send", "status", "kind"),
    [
        (lambda server: server.message(model="other"), 404, "not_found_error"),
        (lambda server: server.client.get("/v1/messages"), 405, "invalid_request_error"),
        (lambda server: server.client.post("/v1/messages/batches"), 404, "not_found_error"),
        (lambda server: server.client.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (lambda server: server.post("/v1/messages", b"{"), 400, "invalid_request_error"),
        (lambda server: server.message("x" * 600), 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_shape_and_status(
    server: LiveServer, send: Callable[[LiveServer], Any], status: int, kind: str
) -> None:
    response = send(server)
    assert (response.status_code, anthropic_error_of(response)["type"]) == (status, kind)


def test_overload_is_told_as_anthropic_does(server: LiveServer) -> None:
    server.engine.is_full = True
    response = server.message()
    assert (response.status_code, anthropic_error_of(response)["type"]) == (429, "rate_limit_error")
    assert response.headers["Retry-After"] == "3"


def test_loading_is_told_as_overloaded() -> None:
    with live_server(FakeBackend(is_loading=True)) as server:
        response = server.message()
        assert (response.status_code, anthropic_error_of(response)["type"]) == (529, "overloaded_error")
        assert "Retry-After" in response.headers


def test_keys_are_taken_in_anthropics_header_too() -> None:
    with live_server(api_key=["right"]) as server:
        refused = server.message(headers={"x-api-key": "wrong"})
        assert (refused.status_code, anthropic_error_of(refused)["type"]) == (401, "authentication_error")
        assert server.message(headers={"x-api-key": "right", "anthropic-version": "2023-06-01"}).status_code == 200
        assert server.message(headers={"Authorization": "Bearer right"}).status_code == 200
        assert server.message(headers={"Authorization": "Bearer wrong", "x-api-key": "right"}).status_code == 401
        assert server.message(headers={"x-api-key": ""}).status_code == 401
        assert server.message().status_code == 401
