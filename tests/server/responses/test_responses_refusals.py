"""/v1/responses: what is not supported is refused by name, what asks for nothing is accepted, nothing is stored."""

import math
from typing import Any

import pytest

from tests.server.events import error_of
from tests.server.live_server import LiveServer
from tests.server.model_talk import RESPONSES_TOOLS as TOOLS

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
NAMED = {"type": "function", "name": "other"}
BUILT_IN = {"type": "web_search", "external_web_access": False}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}


def tool(**keywords: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": keywords}


def formatted(**keywords: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "x", "schema": keywords}}


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
        ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning"),
        ({"include": ["everything"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": [IMAGE]}, "input.0.content.0"),
        ({"input": [{"role": "nobody", "content": ""}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "functon"}]}]}, "input.0.tools.0"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input.0.input"),
        ({"input": [{"type": "local_shell_call", "action": {"env": {"a": "\ud800"}}, "id": "1"}]}, "input.0.action"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}]}, "input.0.arguments"),
        ({"tools": [{"type": "functon", "name": "f"}]}, "tools.0"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools.0.tools.0"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "gbnf"}}]},
         "tools.0.format.syntax"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tools": [BUILT_IN, {**NAMED, "name": "n__f"}, NAMESPACE]}, "tools.2.tools.0.name"),
        ({"tools": [{**NAMESPACE, "name": 127 * "n"}]}, "tools.0.tools.0.name"),
        ({"tools": [tool(maximum=math.inf)]}, "tools.0.parameters"),
        ({"tools": [tool(enum=[[math.nan]])]}, "tools.0.parameters"),
        ({"tools": [tool(properties={"\ud800": {}})]}, "tools.0.parameters"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": ALLOWED}, "tool_choice.tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, BUILT_IN], "tool_choice": BUILT_IN}, "tool_choice"),
        ({"tools": [BUILT_IN], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, BUILT_IN], "tool_choice": {**ALLOWED, "mode": "required", "tools": [BUILT_IN]}},
         "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {**ALLOWED, "tools": [BUILT_IN, NAMED]}}, "tool_choice.tools.1.name"),
        ({"tools": [NAMESPACE, {**NAMESPACE, "name": "m"}], "tool_choice": {**NAMED, "name": "f"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format"),
        ({"text": formatted(maximum=-math.inf)}, "text.format.schema"),
        ({"text": formatted(maximum=math.inf), "tools": TOOLS, "tool_choice": "required"}, "text.format.schema"),
        ({"text": formatted(title="\ud800"), "tools": TOOLS, "tool_choice": "required"}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"formt": {"type": "json_object"}}}, "text.formt"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"reasoning": {"max_tokens": 10}}, "reasoning"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server: LiveServer, parameters: dict[str, Any], param: str) -> None:
    response = server.respond(**parameters)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert param in error_of(response)["message"] and server.engine.requests == []


@pytest.mark.parametrize(
    ("parameters", "param", "message"),
    [
        ({"tools": TOOLS, "tool_choice": {**NAMED, "name": "messages"}}, "tool_choice.name", "'messages', which is"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "must not contain 'messages'"),
        ({"text": formatted(pattern="(messages")}, "text.format", "(messages"),
        ({"input": 129 * [CALLED]}, "input", "input: function calls in a row: List should have at most 128"),
    ],
)
def test_only_the_names_of_parameters_are_translated(
    server: LiveServer, parameters: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(server.respond(**parameters))
    assert error["param"] == param and message in error["message"]


def test_values_that_ask_for_nothing_are_accepted(server: LiveServer) -> None:
    nothing = {"previous_response_id": None, "reasoning": {"effort": None}, "truncation": "disabled", "n": 1}
    nothing |= {"background": False, "store": True, "include": [], "tools": [], "tool_choice": "auto"}
    nothing |= {"parallel_tool_calls": True, "service_tier": "auto", "text": {"format": {"type": "text"}}}
    body = server.respond(max_output_tokens=2, **nothing).json()
    assert (body["store"], body["service_tier"]) == (False, "default")


def test_too_many_tokens_are_refused_under_the_parameters_own_name(server: LiveServer) -> None:
    error = error_of(server.respond(max_output_tokens=5000))
    assert error["code"] == "context_length_exceeded" and "5000 in max_output_tokens" in error["message"]


def test_nothing_is_stored(server: LiveServer) -> None:
    body = server.respond(max_output_tokens=1).json()
    assert server.client.get(f"/v1/responses/{body['id']}").status_code == 404


def test_text_parts_of_another_api_are_refused_with_this_apis_types(server: LiveServer) -> None:
    def refusal(respond: Any, kind: str) -> str:
        message: str = error_of(respond([{"role": "user", "content": [{"type": kind, "text": "Hi"}]}]))["message"]
        return message.partition("not supported: ")[2]

    assert (
        refusal(server.respond, "text") == "the model reads text only, in parts of the type input_text or output_text."
    )
    assert refusal(server.chat, "input_text") == "the model reads text only, in parts of the type text."
