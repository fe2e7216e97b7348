"""/v1/responses: items of tools other than functions, and of thinking that others encrypted."""

from typing import Any

import pytest

from tests.server.live_server import LiveServer
from tests.server.model_talk import prompt_of

HI = {"role": "user", "content": "Hi"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "7"}


def turns(server: LiveServer, *items: dict[str, Any]) -> list[str]:
    """Returns the turns of the prompt behind the user's, without the last, which the model is to write."""
    response = server.respond([HI, *items])
    assert response.status_code == 200, response.text
    return prompt_of(server).split("[")[2:-1]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "x", "status": "completed", "action": {"type": "search", "query": "tea"}},
        {"type": "image_generation_call", "id": "x", "result": "aGk="},
        {"type": "computer_call", "id": "x", "call_id": "1", "action": {"type": "wait"}, "pending_safety_checks": []},
        {"type": "computer_call_output", "call_id": "1", "output": {"type": "computer_screenshot"}},
        {"type": "mcp_list_tools", "id": "x", "server_label": "s", "tools": []},
        {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": []},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "id": "x", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "id": "x", "summary": [], "content": None, "encrypted_content": None},
    ],
)
def test_items_without_text_are_left_out(agent: LiveServer, item: dict[str, Any]) -> None:
    assert turns(agent, item) == []
    alone = agent.respond([item])
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "input")
    assert alone.json()["error"]["message"] == "input: none of the items has text for the model."
    said = {"role": "assistant", "content": "Well."}
    assert turns(agent, item, said, item, HI) == ["assistant]Well.", "user]Hi"]


def test_encrypted_thinking_is_left_out_and_its_summary_is_shown(agent: LiveServer) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"}
    assert turns(agent, thought, {"role": "assistant", "content": "Well."}) == ["assistant](Hm.)Well."]
    plain = {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "Oh."}]}
    assert turns(agent, plain, {"role": "assistant", "content": "Well."}) == ["assistant](Oh.)Well."]


def test_calls_of_custom_tools_are_shown_with_their_results(agent: LiveServer) -> None:
    called = {"type": "custom_tool_call", "call_id": "1", "name": "f", "namespace": "n", "input": 'a"é'}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "7"}]}
    assert turns(agent, called, result) == ["assistant]" + call("n__f", '{"input": "a\\"é"}'), "tool]7"]


@pytest.mark.parametrize("names", [{"call_id": "1"}, {"id": "1"}, {"id": "1", "call_id": None}])
def test_calls_of_a_shell_are_shown_with_their_results(agent: LiveServer, names: dict[str, Any]) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    called = {"type": "local_shell_call", "status": "completed", "action": action, **names}
    shown = "assistant]" + call("local_shell", '{"type": "exec", "command": ["ls"], "env": {}}').replace("[", "")
    for result in ({"type": "local_shell_call_output", "output": "7", **names}, RESULT):
        assert "".join(turns(agent, called, result)) == f"{shown}tool]7"
    parts = [{"stdout": "7\n", "stderr": "no", "outcome": {"type": "exit", "exit_code": 1}}]
    result = {"type": "shell_call_output", "output": parts, **names}
    assert turns(agent, {**called, "type": "shell_call", "action": {"commands": "ls"}}, result) == [
        "assistant]" + call("shell", '{"commands": "ls"}'),
        "tool]7\n\nno",
    ]


def test_runs_of_built_in_tools_are_shown_with_their_text(agent: LiveServer) -> None:
    runs: list[dict[str, Any]] = [
        {"type": "mcp_call", "id": "1", "server_label": "s", "name": "f", "arguments": "{}", "output": "7"},
        {"type": "mcp_call", "id": "2", "server_label": "s", "name": "g", "arguments": "{}", "output": None},
        {"type": "code_interpreter_call", "id": "3", "code": "1", "outputs": [{"type": "logs", "logs": "8"}]},
        {"type": "file_search_call", "id": "4", "queries": [], "results": [{"filename": "a", "text": "9"}]},
    ]
    shown = turns(agent, *runs)
    assert shown[:5] == [
        *("assistant]" + call("f", "{}"), "tool]7", "assistant]" + call("g", "{}"), "tool]"),
        "assistant]" + call("code_interpreter", '{"code": "1"}'),
    ]
    assert shown[5] == "tool]8" and shown[-1] == "tool]a\n9"


def test_a_call_follows_the_text_before_items_that_are_left_out(agent: LiveServer) -> None:
    said, search = {"role": "assistant", "content": "Well."}, {"type": "web_search_call", "id": "x"}
    called = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    assert turns(agent, said, search, called, RESULT) == ["assistant]Well." + call("f", "{}"), "tool]7"]


@pytest.mark.parametrize("arguments", [{"arguments": ""}, {"arguments": None}, {}])
def test_a_call_without_arguments_has_none(agent: LiveServer, arguments: dict[str, Any]) -> None:
    called = {"type": "function_call", "call_id": "1", "name": "f", **arguments}
    assert turns(agent, called, RESULT) == ["assistant]" + call("f", "{}"), "tool]7"]
