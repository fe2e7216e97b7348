"""/v1/responses: the prompt and the parameters that the engine gets."""

import json

import pytest

from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer
from tests.server.model_talk import RESPONSES_TOOLS as TOOLS
from tests.server.model_talk import THOUGHT, prompt_of, saying_tokens


def test_instructions_come_before_the_input(server: LiveServer) -> None:
    server.respond("Hi", instructions="Be brief.")
    assert prompt_of(server).split("[")[1:] == ["system]Be brief.", "user]Hi", "assistant]"]


def test_what_the_model_wrote_in_a_row_is_one_message(agent: LiveServer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "2", "output": []},
        {"role": "assistant", "content": "A."},
        {"role": "assistant", "content": "B."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Oh."}]},
        {"type": "function_call", "call_id": "3", "name": "h", "arguments": ""},
    ]
    agent.respond(items)
    called = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
    assert prompt_of(agent).split("[")[1:] == [
        "user]Hi",
        f"assistant](Hm.)Well.{called.format('f')}{called.format('g')}",
        "tool]one",
        "tool]two",
        "tool]",
        "assistant]A.",
        "assistant]B.",
        f"assistant](Oh.){called.format('h')}",
        "assistant]",
    ]


def test_its_own_output_can_be_sent_back(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    output = agent.respond(tools=TOOLS).json()["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        for item in output
        if item["type"] == "function_call"
    ]
    assert agent.respond([{"role": "user", "content": "Hi"}, *output, *results], tools=TOOLS).status_code == 200
    assert "(Hm.)Let me see.<tool_call>" in prompt_of(agent)


@pytest.mark.parametrize(("arguments", "limit"), [('{"city": oops}', None), ('{"city": "Bern"}', 45)])
def test_a_call_that_is_broken_or_cut_can_be_sent_back(agent: LiveServer, arguments: str, limit: int | None) -> None:
    output_text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    agent.engine.rule = saying_tokens(agent, output_text)
    [call] = agent.respond(tools=TOOLS, max_output_tokens=limit).json()["output"]
    assert call["type"] == "function_call" and arguments.startswith(call["arguments"])
    assert agent.respond([{"role": "user", "content": "Hi"}, call], tools=TOOLS).status_code == 200
    assert json.dumps(call["arguments"]) in prompt_of(agent)


def test_parameters_reach_the_engine(server: LiveServer) -> None:
    server.respond(
        max_output_tokens=7, temperature=0.5, top_p=0.5, top_k=3, seed=5, stop="x", logit_bias={"3": 1}, priority=2,
        include=["message.output_text.logprobs"], top_logprobs=4,
    )  # fmt: skip
    request = server.engine.requests[-1]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (7, 0.5, 0.5, 3, 5)
    assert (params.stop, params.logit_bias, params.logprobs, request.priority) == (("x",), {3: 1.0}, 4, 2)


def test_without_a_limit_the_answer_may_fill_the_context(server: LiveServer) -> None:
    server.engine.rule = saying("Hello")
    server.respond()
    request = server.engine.requests[-1]
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)


def test_a_text_format_is_followed(server: LiveServer) -> None:
    server.engine.rule = saying("{}")
    body = server.respond(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}).json()
    assert server.engine.requests[-1].params.grammar is not None
    assert body["text"]["format"]["schema"] == {"type": "object"}


def test_tools_are_in_the_prompt(agent: LiveServer) -> None:
    agent.respond(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": TOOLS[1:]})
    assert '"name": "get_weather"' in prompt_of(agent)
    agent.respond(tools=TOOLS, tool_choice="none")
    assert "get_weather" not in prompt_of(agent)


def test_one_call_at_a_time_can_be_asked_for(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, THOUGHT)
    output = agent.respond(tools=TOOLS, parallel_tool_calls=False).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]


def test_calls_can_be_required(hermes: LiveServer) -> None:
    hermes.respond(tools=TOOLS[1:], tool_choice="required", max_output_tokens=9)
    assert hermes.engine.requests[-1].params.grammar is not None


def test_template_variables_can_be_passed(agent: LiveServer) -> None:
    agent.respond(chat_template_kwargs={"deep": True})
    assert prompt_of(agent).endswith("[assistant]<think>")


def test_thinking_can_be_bounded(agent: LiveServer) -> None:
    agent.respond(thinking_token_budget=4)
    thinking = agent.engine.requests[-1].params.thinking
    assert thinking is not None and thinking.max_tokens == 4
