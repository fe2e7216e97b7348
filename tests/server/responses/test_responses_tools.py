"""/v1/responses: tools that are not functions become functions, or are left out."""

import json
from typing import Any

import msgspec
import pytest

from server.protocol.response_answers import ResponseBody
from server.protocol.response_tools import BUILT_IN
from tests.server.events import typed_events_of
from tests.server.fake_engine import INFO
from tests.server.live_server import LiveServer
from tests.server.model_talk import RESPONSES_TOOLS as TOOLS
from tests.server.model_talk import prompt_of, saying_tokens

SEARCH = {"type": "web_search", "external_web_access": False}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
CLOSE = {"type": "function", "name": "close", "description": "Closes one.", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [SEARCH, CLOSE, PATCH]}


@pytest.fixture
def roomy(server: LiveServer) -> LiveServer:
    """A server whose model does not think and takes long prompts."""
    server.engine.info = msgspec.structs.replace(INFO, max_model_len=4096)
    return server


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def offered(server: LiveServer) -> list[dict[str, Any]]:
    """Returns the functions that the model was told of last."""
    return [tool["function"] for tool in json.loads(prompt_of(server).partition("[user]")[0] or "[]")]


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_built_in_tools_are_left_out(agent: LiveServer, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    with caplog.at_level("INFO", logger="twostep.server"):
        body = agent.respond(tools=[{"type": kind, "size": 3}, *TOOLS]).json()
    assert [function["name"] for function in offered(agent)] == ["get_weather", "get_time"]
    assert [tool["name"] for tool in body["tools"]] == ["get_weather", "get_time"]
    [line] = [record.getMessage() for record in caplog.records if "built-in" in record.getMessage()]
    assert line.endswith(f"left out built-in tools: {kind}") and body["id"].removeprefix("resp_") in line


def test_with_built_in_tools_alone_nothing_is_called(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, call_of("get_time", "{}"))
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}
    asked: dict[str, Any]
    for asked in ({"tools": [SEARCH]}, {"tools": [SEARCH, *TOOLS], "tool_choice": allowed}):
        body = agent.respond(parallel_tool_calls=False, **asked).json()
        assert [item["type"] for item in body["output"]] == ["message"] and offered(agent) == []


def test_tools_of_a_namespace_are_functions_with_its_name(agent: LiveServer) -> None:
    body = agent.respond(tools=[TOOLS[1], AGENTS]).json()
    assert [function["name"] for function in offered(agent)] == ["get_time", "agents__close", "agents__apply_patch"]
    assert [tool["name"] for tool in body["tools"][1]["tools"]] == ["close", "apply_patch"]
    assert ResponseBody.model_validate(body).model_dump(exclude_unset=True) == body


def test_the_model_is_told_what_a_namespace_is(agent: LiveServer) -> None:
    agent.respond(tools=[{**AGENTS, "tools": [CLOSE, PATCH]}])
    close, patch = offered(agent)
    assert close["description"] == "Closes one.\n\nAll functions whose names begin with agents__: Other agents."
    assert patch["description"] == "Edits files."


def test_a_call_has_the_namespace_of_its_function(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, call_of("agents__close", '{"id": 1}'))
    *events, last = typed_events_of(agent.respond(tools=[AGENTS], stream=True))
    [item] = last["response"]["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "close")
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert (done["name"], done["arguments"]) == ("close", '{"id": 1}')
    agent.respond([{"role": "user", "content": "Hi"}, item], tools=[AGENTS])
    assert '<tool_call>{"name": "agents__close", "arguments": {"id": 1}}</tool_call>' in prompt_of(agent)


@pytest.mark.parametrize("choice", [{"name": "close"}, {"name": "close", "namespace": "agents"}])
def test_a_function_of_a_namespace_can_be_chosen(roomy: LiveServer, choice: dict[str, str]) -> None:
    body = roomy.respond(tools=[*TOOLS, AGENTS], tool_choice={"type": "function", **choice}).json()
    grammar = roomy.engine.requests[-1].params.grammar
    assert grammar is not None and "agents__close" in grammar and "get_time" not in grammar
    assert body["tool_choice"] == {"type": "function", **choice}


def test_a_namespace_need_not_be_named_only_where_the_name_is_clear(roomy: LiveServer) -> None:
    tools = [AGENTS, {**CLOSE, "name": "close"}]
    roomy.respond(tools=tools, tool_choice={"type": "function", "name": "close"})
    grammar = roomy.engine.requests[-1].params.grammar
    assert grammar is not None and "agents__close" not in grammar and "close" in grammar


def test_a_custom_tool_is_a_function_of_one_text(agent: LiveServer) -> None:
    agent.respond(tools=[PATCH])
    parameters: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    parameters["additionalProperties"] = False
    assert offered(agent) == [{"name": "apply_patch", "description": "Edits files.", "parameters": parameters}]


TEXTS = ["", "a", '*** Begin\n+\t"x\\y" é 🐙\u2028\x7f', "ends in \\", "\b\f\r\x1f/", '{"input": "x"}']


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_a_custom_tools_call_is_its_text(agent: LiveServer, text: str, is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    agent.engine.rule = saying_tokens(agent, call_of("apply_patch", arguments))
    events = typed_events_of(agent.respond(tools=[PATCH], stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    done = next(event for event in events if event["type"] == "response.custom_tool_call_input.done")
    [item] = events[-1]["response"]["output"]
    assert "".join(deltas) == done["input"] == item["input"] == text and all(deltas)
    assert done["item_id"] == item["id"] and "name" not in done
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "apply_patch", "completed")
    assert kinds == ["created", "in_progress", "output_item.added", *len(deltas) * ["custom_tool_call_input.delta"],
                     "custom_tool_call_input.done", "output_item.done", "completed"]  # fmt: skip
    assert ResponseBody.model_validate(events[-1]["response"]).output[0].model_dump(exclude_unset=True) == item


def test_a_custom_tools_call_can_be_sent_back(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, call_of("apply_patch", '{"input": "+ \\"a\\""}'))
    [call] = agent.respond(tools=[PATCH]).json()["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    assert agent.respond([{"role": "user", "content": "Hi"}, call, result], tools=[PATCH]).status_code == 200
    assert '"arguments": {"input": "+ \\"a\\""}}</tool_call>[tool]Done.[assistant]' in prompt_of(agent)


def test_a_custom_tools_call_that_is_cut_is_incomplete(agent: LiveServer) -> None:
    agent.engine.rule = saying_tokens(agent, call_of("apply_patch", '{"input": "one two"}'))
    [item] = agent.respond(tools=[PATCH], stop=" two").json()["output"]
    assert (item["input"], item["status"]) == ("one", "incomplete")


def test_a_custom_tool_can_be_chosen(roomy: LiveServer) -> None:
    roomy.respond(tools=[*TOOLS, PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    grammar = roomy.engine.requests[-1].params.grammar
    assert grammar is not None and "apply_patch" in grammar and "get_time" not in grammar


def test_a_regular_expression_binds_a_custom_tools_text(roomy: LiveServer) -> None:
    format_ = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    body = roomy.respond(tools=[{**PATCH, "format": format_}]).json()
    assert '"input": {"type": "string", "pattern": "^(?:a|b)$"}' in prompt_of(roomy)
    grammar = roomy.engine.requests[-1].params.grammar
    assert grammar is not None and "(?:a|b)" in grammar and body["tools"][0]["format"] == format_
