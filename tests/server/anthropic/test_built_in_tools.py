"""/v1/messages: tools that only their type describes, and tools that only code may call."""

import json
import logging
from typing import Any

import pytest

from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_TOOLS as TOOLS
from tests.server.model_talk import prompt_of, saying_tokens

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
LEFT_OUT = [
    SEARCH,
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
    {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
    {**TOOLS[0], "allowed_callers": ["code_execution_20250825"]},
]
BASH = {"type": "bash_20250124", "name": "bash"}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9}
MEMORY = {"type": "memory_20250818", "name": "memory"}


def offered(server: LiveServer) -> list[dict[str, Any]]:
    tools, _ = json.JSONDecoder().raw_decode(prompt_of(server))
    return [tool["function"] for tool in tools]


@pytest.mark.parametrize("tool", LEFT_OUT, ids=lambda tool: tool.get("type", "custom"))
def test_a_tool_that_nobody_here_could_run_is_left_out_and_named_in_the_log(
    agent: LiveServer, caplog: pytest.LogCaptureFixture, tool: dict[str, Any]
) -> None:
    with caplog.at_level(logging.INFO, "twostep.server"):
        response = agent.message(tools=[tool, TOOLS[1]], tool_choice={"type": "auto"})
    assert response.status_code == 200, response.text
    assert [function["name"] for function in offered(agent)] == ["get_time"]
    assert f"left out tools that cannot be run here: {tool.get('type', 'get_weather')}" in caplog.text


@pytest.mark.parametrize("choice", [None, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}])
def test_a_request_may_have_no_tool_but_those(agent: LiveServer, choice: dict[str, Any] | None) -> None:
    agent.message()
    without = prompt_of(agent)
    assert agent.message(tools=LEFT_OUT, tool_choice=choice).status_code == 200
    assert prompt_of(agent) == without


def test_other_tools_can_be_required_beside_them(plain: LiveServer) -> None:
    plain.message(tools=[SEARCH, *TOOLS], tool_choice={"type": "tool", "name": "get_time"})
    assert plain.engine.requests[-1].params.grammar is not None
    assert "get_weather" in prompt_of(plain) and "web_search" not in prompt_of(plain)


@pytest.mark.parametrize(
    ("tool", "properties"),
    [
        (BASH, "command restart"),
        (EDITOR, "command path view_range file_text old_str new_str"),
        (
            MEMORY,
            "command path view_range file_text old_str new_str insert_line insert_text old_path new_path",
        ),
    ],
)
def test_a_tool_that_the_client_runs_is_a_function(spacious: LiveServer, tool: dict[str, Any], properties: str) -> None:
    assert spacious.message(tools=[tool]).status_code == 200
    [function] = offered(spacious)
    assert function["name"] == tool["name"] and function["description"]
    assert list(function["parameters"]["properties"]) == properties.split()


def test_its_calls_come_back_under_its_name(spacious: LiveServer) -> None:
    call = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    spacious.engine.rule = saying_tokens(spacious, call)
    answer = spacious.message(tools=[BASH], max_tokens=200).json()
    [block] = answer["content"]
    assert (block["name"], block["input"], answer["stop_reason"]) == ("bash", {"command": "ls"}, "tool_use")


@pytest.mark.parametrize("tool", [BASH, EDITOR, MEMORY])
def test_its_calls_can_be_required(plain: LiveServer, tool: dict[str, Any]) -> None:
    response = plain.message(tools=[tool], tool_choice={"type": "tool", "name": tool["name"]})
    assert response.status_code == 200, response.text
    assert plain.engine.requests[-1].params.grammar is not None


def test_examples_of_inputs_reach_the_model(spacious: LiveServer) -> None:
    spacious.message(tools=[{**TOOLS[0], "input_examples": [{"city": "Oslo"}]}])
    [function] = offered(spacious)
    assert function["parameters"]["examples"] == [{"city": "Oslo"}]


def test_examples_of_inputs_are_no_part_of_what_a_call_must_satisfy(plain: LiveServer) -> None:
    tool = {**TOOLS[0], "strict": True, "input_examples": [{"city": "Oslo"}, {"else": 1}]}
    assert plain.message(tools=[tool], tool_choice={"type": "any"}).status_code == 200
    assert "Oslo" in prompt_of(plain) and plain.engine.requests[-1].params.grammar is not None


@pytest.mark.parametrize("num_tools", [129, 400])
def test_agents_may_have_hundreds_of_tools(spacious: LiveServer, num_tools: int) -> None:
    functions = [{"name": f"mcp__server__tool_{index}", "description": "Does it."} for index in range(num_tools)]
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    for response in (
        spacious.message(tools=[{**each, "input_schema": schema} for each in functions]),
        spacious.chat(
            tools=[{"type": "function", "function": {**each, "parameters": schema}} for each in functions],
            max_tokens=1,
        ),
        spacious.respond(
            tools=[{"type": "function", **each, "parameters": schema} for each in functions], max_output_tokens=16
        ),
    ):
        assert response.status_code == 200, response.text
        assert [function["name"] for function in offered(spacious)] == [each["name"] for each in functions]
