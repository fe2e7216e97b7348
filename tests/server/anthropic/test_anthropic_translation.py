"""/v1/messages: the prompt and the parameters that the engine gets."""

from typing import Any

import pytest

from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import ANTHROPIC_TOOLS as TOOLS
from tests.server.model_talk import THOUGHT, prompt_of, saying_tokens, turns_of
from tests.server.tools.tool_chats import THINKING


def test_blocks_become_messages(agent: LiveServer) -> None:
    agent.message(
        [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Well."},
                    *({"type": "tool_use", "id": call_id, "name": "f", "input": {"x": 1}} for call_id in "12345"),
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "2", "content": "gone", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "3"},
                    {"type": "tool_result", "tool_use_id": "4", "content": []},
                    {"type": "tool_result", "tool_use_id": "5", "content": [], "is_error": True},
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
        f"assistant](Hm.)Well.{5 * call}",
        "tool]one",
        "tool]Error: gone",
        "tool]",
        "tool]",
        "tool]Error:",
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


def test_an_answer_without_anything_can_be_sent_back(agent: LiveServer) -> None:
    hi = {"role": "user", "content": "Hi"}
    assert agent.message([hi, {"role": "assistant", "content": []}, hi]).status_code == 200
    assert turns_of(agent) == ["user]Hi", "assistant]", "user]Hi", "assistant]"]


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


def test_a_model_that_thinks_between_other_marks_is_stopped_at_those() -> None:
    template = THINKING.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    backend = FakeBackend(chat_templates={"default": template}, special_tokens={"[THINK]": 0xFA, "[/THINK]": 0xFB})
    with live_server(backend) as server:
        assert server.message(thinking={"type": "disabled"}).status_code == 200
        bound = server.engine.requests[-1].params.thinking
        assert bound is not None and bound.max_tokens == 0


def test_a_model_without_tokens_for_its_marks_is_not_stopped() -> None:
    """Only its template can turn the thinking off."""
    with live_server(FakeBackend(chat_templates={"default": THINKING + "{{ enable_thinking }}"})) as server:
        assert server.message(thinking={"type": "disabled"}).status_code == 200
        assert server.engine.requests[-1].params.thinking is None and prompt_of(server).endswith("[assistant]False")


@pytest.mark.parametrize(("kind", "enabled"), [("enabled", True), ("disabled", False), ("adaptive", None)])
def test_templates_get_whether_to_think(kind: str, enabled: bool | None) -> None:
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
    ("choice", "is_in_prompt"), [({"type": "auto"}, True), ({"type": "none"}, False), (None, True)]
)  # fmt: skip
def test_tools_are_in_the_prompt(agent: LiveServer, choice: dict[str, Any] | None, is_in_prompt: bool) -> None:
    agent.message(tools=TOOLS, tool_choice=choice)
    assert ('"name": "get_weather"' in prompt_of(agent)) == is_in_prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
def test_calls_can_be_required(plain: LiveServer, choice: dict[str, Any]) -> None:
    plain.message(tools=TOOLS[1:], tool_choice=choice)
    assert plain.engine.requests[-1].params.grammar is not None


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
