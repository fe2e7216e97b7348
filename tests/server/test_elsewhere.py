"""What one endpoint defines, another refuses by name, unless it asks for nothing."""

from typing import Any

import pytest

from tests.server.live_server import LiveServer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/embeddings": {"input": "Hi"},
}
STRAY: list[tuple[str, str, Any]] = [
    ("/v1/completions", "thinking_token_budget", 3),
    ("/v1/completions", "reasoning_effort", "low"),
    ("/v1/completions", "functions", [{"name": "f"}]),
    ("/v1/chat/completions", "max_output_tokens", 3),
    ("/v1/responses", "chat_template", "x"),
    ("/v1/responses", "echo", True),
    ("/v1/responses", "prompt_logprobs", 1),
    ("/v1/messages", "top_logprobs", 2),
    ("/v1/messages", "return_token_ids", True),
    ("/v1/embeddings", "stream", True),
    ("/v1/embeddings", "structured_outputs", {"regex": "a"}),
]
ASKING_FOR_NOTHING: list[tuple[str, str, Any]] = [
    ("/v1/completions", "functions", []),
    ("/v1/completions", "parallel_tool_calls_of_nobody", True),
    ("/v1/responses", "echo", False),
    ("/v1/responses", "suffix", ""),
    ("/v1/messages", "n", 1),
    ("/v1/embeddings", "stream", False),
    ("/v1/embeddings", "user", "me"),
    ("/v1/messages/count_tokens", "temperature", 0.5),
]


@pytest.mark.parametrize(("path", "name", "value"), STRAY)
def test_a_field_of_another_endpoint_is_refused(server: LiveServer, path: str, name: str, value: Any) -> None:
    response = server.client.post(path, json={**BODIES[path], name: value})
    assert response.status_code == 400 and name in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "name", "value"), ASKING_FOR_NOTHING)
def test_one_that_asks_for_nothing_is_let_through(server: LiveServer, path: str, name: str, value: Any) -> None:
    assert server.client.post(path, json={**BODIES[path], name: value}).status_code == 200
