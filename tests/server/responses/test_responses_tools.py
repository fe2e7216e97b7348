"""/v1/responses: tools that are not functions become functions, or are left out."""

import json
from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from server.protocol.response_answers import ResponseBody
from server.protocol.response_tools import BUILT_IN
from tests.engine.grammar.grammars import accepts
from tests.server.events import error_of, typed_events_of
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import RESPONSES_TOOLS as TOOLS
from tests.server.model_talk import prompt_of, saying_tokens
from tests.server.tools.call_templates import PARAMETERS
from tests.server.tools.tool_chats import HERMES

ROOMY = msgspec.structs.replace(INFO, max_model_len=4096)
SEARCH = {"type": "web_search", "external_web_access": False}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
CLOSE = {"type": "function", "name": "close", "description": "Closes one.", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [SEARCH, CLOSE, PATCH]}


@pytest.fixture(scope="module")
def shared_roomy() -> Generator[LiveServer, None, None]:
    with live_server(FakeBackend(chat_templates={"default": HERMES})) as running:
        yield running


@pytest.fixture
def roomy(shared_roomy: LiveServer) -> LiveServer:
    """A server whose model does not think, takes long prompts, and writes calls between marks that are text."""
    shared_roomy.engine.reset()
    shared_roomy.engine.info = ROOMY
    return shared_roomy


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


def test_the_model_is_told_of_a_regular_expression(roomy: LiveServer) -> None:
    roomy.respond(tools=[grammared("regex", "a|b")])
    assert '"input": {"type": "string", "pattern": "^(?:a|b)$"}' in prompt_of(roomy)


LARK = 'start: "+" LINE+\nLINE: /[^\\n]+/ NL\n%import common.NEWLINE -> NL\n'


def grammared(syntax: str, definition: str) -> dict[str, Any]:
    return {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


@pytest.mark.parametrize(("syntax", "definition"), [("lark", LARK), ("regex", r"\+([^\n]+(\r?\n)+)+")])
def test_a_grammar_binds_a_custom_tools_text(roomy: LiveServer, syntax: str, definition: str) -> None:
    tool = grammared(syntax, definition)
    body = roomy.respond(
        tools=[tool], tool_choice={"type": "custom", "name": "apply_patch"}, max_output_tokens=9
    ).json()
    grammar = roomy.engine.requests[-1].params.grammar
    assert grammar is not None and body["tools"] == [tool]

    def call(text: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': {'input': text}})}\n</tool_call>"

    assert [text for text in ('+"a"\n\nb\\\n', "+\n", "a\n", "+a") if accepts(grammar, call(text))] == ['+"a"\n\nb\\\n']


def test_the_model_is_told_of_a_lark_grammar(roomy: LiveServer) -> None:
    roomy.respond(tools=[grammared("lark", LARK)], max_output_tokens=9)
    told = json.dumps("Edits files.\n\nThe input follows this grammar, in Lark's notation:\n" + LARK)
    prompt = prompt_of(roomy)
    assert told in prompt and '"grammar"' not in prompt and "pattern" not in prompt


@pytest.mark.parametrize(
    ("syntax", "definition", "why"),
    [
        ("lark", 'start: "a" start | ""', "circular"),
        ("lark", "start: <think>", "<think> is not supported within a JSON string"),
        ("lark", 'start: %json {"type": "string"}', "must not contain %json"),
        ("lark", "start: missing", "unknown name"),
        ("regex", "(a", "(a"),
        ("regex", "a(?=b)", "look"),
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused_by_its_place(
    roomy: LiveServer, syntax: str, definition: str, why: str
) -> None:
    namespace = {"type": "namespace", "name": "n", "tools": [SEARCH, grammared(syntax, definition)]}
    error = error_of(roomy.respond(tools=[SEARCH, TOOLS[1], namespace]))
    assert error["param"] == "tools.2.tools.1.format.definition"
    assert error["message"].startswith("tools.2.tools.1.format.definition: ") and why in error["message"]


def test_tools_of_the_input_are_offered_as_those_of_the_request_are(agent: LiveServer) -> None:
    agent.engine.info = ROOMY
    more = {"type": "additional_tools", "role": "developer", "tools": [SEARCH, TOOLS[1], AGENTS]}
    agent.engine.rule = saying_tokens(agent, call_of("agents__apply_patch", '{"input": "+a"}'))
    body = agent.respond([more, {"role": "user", "content": "Hi"}, more], tools=[TOOLS[1]]).json()
    assert [function["name"] for function in offered(agent)] == ["get_time", "agents__close", "agents__apply_patch"]
    [item] = body["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "agents", "apply_patch")


def test_tools_of_the_input_have_their_places(agent: LiveServer) -> None:
    more = {"type": "additional_tools", "tools": [{**TOOLS[1], "description": "Another."}]}
    error = error_of(agent.respond([{"role": "user", "content": "Hi"}, more], tools=[TOOLS[1]]))
    assert error["param"] == "input.1.tools.0.name" and "must not be 'get_time' again" in error["message"]


def test_a_schema_that_cannot_be_kept_is_refused_by_its_place(roomy: LiveServer) -> None:
    function = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object", "enum": 1}}
    error = error_of(roomy.respond(tools=[SEARCH, {**AGENTS, "tools": [SEARCH, function]}]))
    assert error["param"] == "tools.1.tools.1.parameters"


def test_a_lark_grammar_is_refused_where_calls_are_not_written_in_json(no_settings_from_outside: None) -> None:
    with live_server(FakeBackend(FakeEngine(info=ROOMY), chat_templates={"default": PARAMETERS})) as server:
        error = error_of(server.respond(tools=[grammared("lark", LARK)]))
        assert error["param"] == "tools.0.format.definition" and "this model's format of calls" in error["message"]
        assert server.respond(tools=[grammared("regex", "a")], max_output_tokens=1).status_code == 200
