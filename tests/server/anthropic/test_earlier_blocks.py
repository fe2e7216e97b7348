"""/v1/messages: blocks of earlier turns, elsewhere. What is text in them reaches the model, the rest is left out."""

from typing import Any

import pytest

from tests.server.live_server import LiveServer
from tests.server.model_talk import ANTHROPIC_CALL, prompt_of

HI = {"role": "user", "content": "Hi"}
SO = {"type": "text", "text": "So."}
NOTE = {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}}
FOUND = {"type": "search_result", "source": "S", "title": "T", "content": [{"type": "text", "text": "X"}]}


def document(content: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "content", "content": content}}


def hit(title: str) -> dict[str, Any]:
    return {"type": "web_search_result", "title": title, "url": f"http://{title}", "encrypted_content": "secret"}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "redacted_thinking", "data": "secret"}, ""),
        ({"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "secret"}}, ""),
        ({"type": "mcp_tool_use", "id": "1", "name": "f", "server_name": "x", "input": {}}, ""),
        (
            {"type": "web_search_tool_result", "tool_use_id": "1", "content": [hit("a"), hit("b")]},
            "a\nhttp://a\nb\nhttp://b\n",
        ),
        ({"type": "web_search_tool_result", "tool_use_id": "1", "content": {"error_code": "secret"}}, ""),
        (
            {"type": "web_fetch_tool_result", "content": {"type": "web_fetch_result", "url": "u", "content": NOTE}},
            "u\nT\nD\n",
        ),
        (
            {
                "type": "code_execution_tool_result",
                "content": {"type": "code_execution_result", "stdout": "7", "stderr": "", "return_code": 0},
            },
            "7\n",
        ),
        ({"type": "mcp_tool_result", "content": [{"type": "text", "text": "7"}], "is_error": False}, "7\n"),
        (
            {
                "type": "mcp_tool_result",
                "content": [{"type": "image", "source": {"type": "base64", "data": "secret"}}],
            },
            "",
        ),
        ({"type": "mcp_tool_result", "content": None}, ""),
    ],
)
def test_an_assistants_block_is_read_where_it_has_text(agent: LiveServer, block: dict[str, Any], text: str) -> None:
    response = agent.message([HI, {"role": "assistant", "content": [block, SO]}, HI])
    assert response.status_code == 200, response.text
    assert prompt_of(agent) == f"[user]Hi[assistant]{text}So.[user]Hi[assistant]"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (NOTE, "T\nC\nD"),
        ({"type": "document", "source": {"type": "text", "data": "D", "media_type": "text/plain"}}, "D"),
        (document("D"), "D"),
        (document([{"type": "text", "text": "D"}, {"type": "text", "text": "E"}]), "D\nE"),
        ({**NOTE, "citations": {"enabled": False}}, "T\nC\nD"),
        (FOUND, "T\nS\nX"),
        ({"type": "tool_reference", "tool_name": "get_time"}, "get_time"),
    ],
)
def test_documents_and_search_results_are_read_as_text(agent: LiveServer, block: dict[str, Any], text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    response = agent.message([ANTHROPIC_CALL, {"role": "user", "content": [block, result]}])
    assert response.status_code == 200, response.text
    assert prompt_of(agent).endswith(f"[user]{text}[tool]{text}[assistant]")


def test_a_deep_result_is_read_to_a_bound(agent: LiveServer) -> None:
    deep: Any = "secret"
    for _ in range(50):
        deep = [deep]
    block = {"type": "mcp_tool_result", "content": deep}
    assert agent.message([HI, {"role": "assistant", "content": [block, SO]}]).status_code == 200
    assert "secret" not in prompt_of(agent)


def test_a_result_has_as_many_values_as_other_json_may(agent: LiveServer) -> None:
    block = {"type": "mcp_tool_result", "content": {"results": [0] * (2**17 + 1)}}
    response = agent.message([HI, {"role": "assistant", "content": [block]}])
    assert response.status_code == 400 and "messages.1.content.0.content" in response.json()["error"]["message"]
