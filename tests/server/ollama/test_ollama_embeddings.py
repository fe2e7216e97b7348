"""/api/embed and /api/embeddings: the vectors of /v1/embeddings, as Ollama's clients ask for them."""

from typing import Any

import pytest

from server.protocol.ollama_embeddings import EmbedAnswer, OlderEmbedAnswer
from tests.server.fake_engine import INFO
from tests.server.live_server import LiveServer


def vectors(server: LiveServer, value: Any, **fields: Any) -> list[Any]:
    """Returns what /v1/embeddings answers."""
    data = server.post_json("/v1/embeddings", {"input": value, **fields}).json()["data"]
    return [each["embedding"] for each in data]


@pytest.mark.parametrize("value", ["ab", ["a", "bc"], [5, 6]])
def test_vectors_are_those_of_the_other_endpoint(server: LiveServer, value: Any) -> None:
    answer = server.post_json("/api/embed", {"model": "fake:latest", "input": value, "keep_alive": "5m"})
    body = EmbedAnswer.model_validate(answer.json())
    assert body.model == "fake" and body.embeddings == vectors(server, value)
    assert body.timings and body.prompt_eval_count == body.timings.prompt_tokens > 0 and body.total_duration
    assert "eval_count" not in answer.json() and answer.headers["X-Prompt-Tokens"] == str(body.prompt_eval_count)


def test_the_older_form_has_one_vector(server: LiveServer) -> None:
    answer = server.post_json("/api/embeddings", {"model": "fake", "prompt": "ab", "options": {"num_ctx": 512}})
    assert OlderEmbedAnswer.model_validate(answer.json()).embedding == vectors(server, "ab")[0]


def test_without_a_prompt_nothing_is_computed(server: LiveServer) -> None:
    assert server.post_json("/api/embeddings", {}).json() == {"embedding": []}
    for body in ({}, {"input": ""}, {"input": []}, {"input": None}):
        assert server.post_json("/api/embed", body).json() == {"model": "fake", "embeddings": []}
    assert server.engine.requests == []


def test_of_what_is_too_long_the_beginning_stays_unless_it_must_not_be_cut(server: LiveServer) -> None:
    long = "a" * INFO.max_model_len  # and the BOS token
    server.post_json("/api/embed", {"input": long})
    server.post_json("/api/embeddings", {"prompt": long})
    expected = [256, *[97] * (INFO.max_model_len - 1)]
    assert [request.prompt_token_ids for request in server.engine.requests] == [expected, expected]
    refused = server.post_json("/api/embed", {"input": long, "truncate": False})
    assert refused.status_code == 400 and refused.json()["error"].endswith("Shorten it, or set truncate.")


def test_the_servers_own_parameters_cut_too(server: LiveServer) -> None:
    server.post_json("/api/embed", {"input": "abcd", "truncate_prompt_tokens": 2})
    assert server.engine.requests[-1].prompt_token_ids == [99, 100]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/api/embed", {"input": ["a", 5]}, "input"),
        ("/api/embed", {"input": "a", "dimensions": 1}, "dimensions must be "),
        ("/api/embed", {"input": "a", "tools": [{}]}, "tools belongs to "),
        ("/api/embed", {"input": "a", "options": {"colour": 1}}, "options.colour"),
        ("/api/embeddings", {"prompt": ["a"]}, "prompt"),
        ("/api/embeddings", {"prompt": "a", "truncate": False}, "truncate is not supported: use truncate_prompt"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(server: LiveServer, path: str, body: dict[str, Any], told: str) -> None:
    refused = server.post_json(path, body)
    assert refused.status_code == 400 and told in refused.json()["error"], refused.text


def test_a_model_that_is_not_served_is_not_found(server: LiveServer) -> None:
    assert server.post_json("/api/embed", {"model": "other", "input": "a"}).status_code == 404
