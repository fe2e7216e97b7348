"""/v1/messages: what is not supported is refused by name, and every error has Anthropic's shape and status."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.events import anthropic_error_of
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import ANTHROPIC_CALL as CALL
from tests.server.model_talk import ANTHROPIC_TOOLS as TOOLS
from tests.server.model_talk import ANTHROPIC_USE as USE

IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
NOTE = {"type": "document", "source": {"type": "text", "data": "x"}}
PDF = {"type": "base64", "data": "x"}
CITED = {"enabled": True}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
NOT = {"type": "object", "properties": {"x": {"not": {}}}}
CLEAR = {"type": "clear_thinking_20251015"}
ANY = {"tool_choice": {"type": "any"}}
OTHER = {**RESULT, "tool_use_id": "2"}


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: 'image'"),
        (
            {"messages": [{"role": "user", "content": [{**NOTE, "source": PDF}]}]},
            "messages.0.content.0.source: 'base64'",
        ),
        ({"messages": [{"role": "user", "content": [{**NOTE, "citations": CITED}]}]}, "messages.0.content.0.citations"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "0: 'container_upload'"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [PDF]}]}]}, "content.0.content.0: 'base64'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0: 'tool_use'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.tool_use_id must be the id of"),
        ({"messages": [CALL, {"role": "user", "content": [RESULT, OTHER]}]}, "messages.1.content.1.tool_use_id"),
        ({"messages": [{"role": "user", "content": [RESULT]}, CALL]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "compaction", "content": "x"}]}]}, "'compaction'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "So "}, USE]}]}, "messages cannot"),
        ({"system": [IMAGE]}, "system.0: 'image'"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1.01}, "temperature"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences must not"),
        ({"tools": [{"type": "bash", "name": "bash"}]}, "tools.0.type: 'bash'"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools.0.name"),
        ({"tools": [SEARCH, TOOLS[0], TOOLS[0]]}, "tools.2.name"),
        ({"tools": [SEARCH], **ANY}, "tool_choice.type is 'any', but web_search_20250305"),
        (
            {"tools": [SEARCH, TOOLS[0]], "tool_choice": {"type": "tool", "name": "web_search"}},
            "is 'web_search', a tool",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "stop"}}, "tool_choice.name is 'stop', which"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs must not contain 'messages'"),
        ({"messages": [{"role": "assistant", "content": 129 * [USE]}]}, "messages: tool_use blocks of a turn: List"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display"),
        ({"thinking": {"type": "adaptive", "budget": 9}}, "thinking"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_calls": True}},
            "tool_choice.disable_",
        ),
        ({"output_config": {"effort": "lots"}}, "output_config.effort"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'clear_tool_uses_20250919'"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits.0.type"),
        ({"context_management": {"edits": [{**CLEAR, "keep": "none"}]}}, "context_management.edits.0.keep"),
        ({"context_management": {"edit": []}}, "context_management.edit"),
        ({"output_config": {"formatt": {}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "strict": True}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"compaction": {"type": "x"}}, "compaction"),
        ({"fallbacks": [{"model": "x"}]}, "fallbacks"),
        ({"thread": {"type": "continue", "previous_message_id": "x"}}, "thread"),
        ({"n": 2}, "n "),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: LiveServer, parameters: dict[str, Any], place: str) -> None:
    response = server.message(**({"messages": [{"role": "user", "content": "Hi"}]} | parameters))
    error = anthropic_error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert place in error["message"] and server.engine.requests == []


def test_a_result_may_answer_a_call_of_any_earlier_message(server: LiveServer) -> None:
    later = [{"role": "user", "content": [{"type": "text", "text": "Go on."}]}, {"role": "user", "content": [RESULT]}]
    assert server.message([CALL, *later]).status_code == 200


def test_tokens_of_a_result_alone_are_counted(server: LiveServer) -> None:
    """Agents ask what single messages take."""
    messages = [{"role": "user", "content": [RESULT]}]
    assert server.client.post("/v1/messages/count_tokens", json={"messages": messages}).status_code == 200


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


def test_a_schema_that_cannot_be_enforced_has_the_place_of_its_tool(plain: LiveServer) -> None:
    """Tools that are left out before it count."""
    error = anthropic_error_of(plain.message(tools=[SEARCH, {**TOOLS[0], "input_schema": NOT}], **ANY))
    assert error["message"].startswith("tools.1.input_schema")


def test_a_prompt_too_long_is_told_in_words_that_agents_know(server: LiveServer) -> None:
    error = anthropic_error_of(server.message("x" * 600))
    counted = server.client.post(
        "/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x" * 600}]}
    )
    assert error["message"] == f"prompt is too long: {counted.json()['input_tokens']} tokens > 511 maximum"
    assert server.engine.requests == []


def test_overload_has_anthropics_error(server: LiveServer) -> None:
    server.engine.is_full = True
    response = server.message()
    assert (response.status_code, anthropic_error_of(response)["type"]) == (429, "rate_limit_error")
    assert response.headers["Retry-After"] == "3"


def test_loading_is_an_overloaded_error() -> None:
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
