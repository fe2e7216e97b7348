"""A field that only other endpoints define is refused by name, unless its value asks for nothing."""

from typing import Any

import pytest

from server.protocol.foreign_fields import FOREIGN_FIELDS, FOREIGN_NEUTRAL
from server.protocol.refusals import find_typo
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
    ("/v1/responses", "add_special_tokens", True),
    ("/v1/responses", "prompt_logprobs", 0),
    ("/v1/responses", "logprobs", 0),
    ("/v1/messages", "add_special_tokens", True),
    ("/v1/messages", "stop", ["a"]),
    ("/v1/chat/completions", "regex", "[0-9]+"),
    ("/v1/completions", "do_sample", False),
    ("/v1/completions", "no_repeat_ngram_size", 2),
    ("/v1/completions", "logits_processors", ["x"]),
    ("/v1/embeddings", "max_tokens", 16),
    ("/v1/embeddings", "stream", True),
    ("/v1/embeddings", "structured_outputs", {"regex": "a"}),
]
ASKING_FOR_NOTHING: list[tuple[str, str, Any]] = [
    ("/v1/completions", "functions", []),
    ("/v1/completions", "repeat_penalty", 1.0),
    ("/v1/completions", "mirostat", 0),
    ("/v1/completions", "parallel_tool_calls_of_nobody", True),
    ("/v1/completions", "top_logprobs", 0),
    ("/v1/chat/completions", "truncation", "disabled"),
    ("/v1/chat/completions", "top_logprobs", 0),
    ("/v1/chat/completions", "verbosity", "medium"),
    ("/v1/chat/completions", "do_sample", True),
    ("/v1/responses", "context_management", []),
    ("/v1/messages", "mcp_servers", []),
    ("/v1/messages", "system", []),
    ("/v1/responses", "echo", False),
    ("/v1/responses", "logprobs", False),
    ("/v1/responses", "response_format", {"type": "text"}),
    ("/v1/messages", "stop", []),
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


@pytest.mark.parametrize(
    ("path", "name", "why"),
    [
        ("/v1/completions", "tools", "belongs to chat completions, /v1/responses, /v1/messages, /api/chat"),
        ("/v1/completions", "verbosity", "is not supported by this server"),
        ("/v1/messages", "echo", "belongs to /v1/completions, chat completions"),
    ],
)
def test_a_refusal_says_where_the_field_belongs(server: LiveServer, path: str, name: str, why: str) -> None:
    response = server.client.post(path, json={**BODIES[path], name: "x"})
    assert response.json()["error"]["message"] == f"{name} {why}."


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("name", "words"), [("max_new_tokens", "max_tokens"), ("mirostat", "top_p"), ("lora", "one")])
def test_names_of_other_servers_are_refused_with_ours(server: LiveServer, path: str, name: str, words: str) -> None:
    if path == "/v1/embeddings":
        return
    response = server.client.post(path, json={**BODIES[path], name: 3})
    assert response.status_code == 400 and words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("/v1/completions", "max_token", "max_tokens"),
        ("/v1/completions", "temprature", "temperature"),
        ("/v1/chat/completions", "tool_chioce", "tool_choice"),
        ("/v1/chat/completions", "toolz", "tools"),
        ("/v1/chat/completions", "sead", "seed"),
        ("/v1/chat/completions", "stpo", "stop"),
        ("/v1/chat/completions", "strean", "stream"),
        ("/v1/chat/completions", "topP", "top_p"),
        ("/v1/chat/completions", "top-p", "top_p"),
        ("/v1/completions", "MAX_TOKENS", "max_tokens"),
        ("/v1/completions", "maxTokens", "max_tokens"),
        ("/v1/responses", "max_output_token", "max_output_tokens"),
        ("/v1/messages", "stop_sequence", "stop_sequences"),
        ("/v1/embeddings", "encoding_fromat", "encoding_format"),
    ],
)
def test_a_name_that_is_nearly_one_of_ours_is_taken_for_a_mistake(
    server: LiveServer, path: str, name: str, meant: str
) -> None:
    response = server.client.post(path, json={**BODIES[path], name: 3})
    assert response.status_code == 400 and f"did you mean {meant}?" in response.json()["error"]["message"]


def test_mistakes_are_looked_for_among_the_first_and_short_names() -> None:
    others = [f"vendor_{number}" for number in range(8)]
    assert find_typo([*others[:7], "temprature"], ["temperature"]) == ("temprature", "temperature")
    assert find_typo([*others, "temprature"], ["temperature"]) is None
    assert find_typo(["mode", "use", "sotp", "m"], ["model", "user", "stop", "n"]) == ("mode", "model")
    long = "temperature" * 6
    assert find_typo([long + "x"], [long]) is None


def test_looking_for_mistakes_is_bounded(server: LiveServer) -> None:
    many = {f"{'temperature' * 5}{number}": 1 for number in range(200)}
    assert server.client.post("/v1/completions", json={**BODIES["/v1/completions"], **many}).status_code == 200


FOREIGN = [(name, value) for name, values in FOREIGN_NEUTRAL.items() for value in values]


@pytest.mark.parametrize(("name", "value"), FOREIGN)
def test_a_field_of_another_server_that_asks_for_nothing_is_accepted(server: LiveServer, name: str, value: Any) -> None:
    for path, body in BODIES.items():
        assert server.client.post(path, json={**body, name: value}).status_code == 200, path


@pytest.mark.parametrize("name", FOREIGN_FIELDS)
def test_a_field_of_another_server_that_changes_the_answer_is_refused_everywhere(server: LiveServer, name: str) -> None:
    for path, body in BODIES.items():
        response = server.client.post(path, json={**body, name: "x"})
        assert (response.status_code, name in response.text) == (400, True), path


@pytest.mark.parametrize(("path", "name", "value"), ASKING_FOR_NOTHING)
def test_a_neutral_value_is_accepted(server: LiveServer, path: str, name: str, value: Any) -> None:
    assert server.client.post(path, json={**BODIES[path], name: value}).status_code == 200


def test_undefined_fields_are_logged_with_the_requests_id(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="twostep.server"):
        server.complete("Hi", vendors_own=1, request_id="mine")
    assert "request mine: ignored fields that nobody defines: 'vendors_own'" in caplog.messages
