"""Fuzzing of request bodies: each gets an answer below 500, in time and in shape, and leaves nothing behind."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from tests.fuzz import fuzz
from tests.server.events import chunks_of, error_of
from tests.server.live_server import LiveServer

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
TOKEN_IDS = st.lists(st.integers(-1, 260), max_size=5)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=20)
    | st.lists(st.text(max_size=9), max_size=3)
    | TOKEN_IDS
    | st.lists(TOKEN_IDS, max_size=3),
    "max_tokens": st.integers(-1, 40),
    "n": st.integers(0, 4),
    "best_of": st.integers(0, 5),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(-1, 5),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-110, 110), max_size=3),
    "stop_token_ids": TOKEN_IDS,
    "allowed_token_ids": TOKEN_IDS,
    "model": st.just("fake"),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "truncate_prompt_tokens": st.integers(-2, 5),
    "prompt_logprobs": st.integers(0, 3),
}
BODIES = st.fixed_dictionaries(
    {"prompt": LIKELY["prompt"]},
    optional={
        name: LIKELY.get(name, st.nothing()) | ANYTHING for name in CompletionRequest.model_fields if name != "prompt"
    }
    | {"some_field": ANYTHING},
)
CONTENT = st.text(max_size=9) | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "image_url"]), "text": st.text(max_size=9)})
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
        optional={
            "content": CONTENT | ANYTHING,
            "tool_call_id": st.just("1"),
            "reasoning_content": st.text(max_size=5),
            "tool_calls": ANYTHING
            | st.just([{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]),
            "some_field": ANYTHING,
        },
    ),
    max_size=4,
)
LIKELY_IN_CHAT = LIKELY | {
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "max_completion_tokens": st.integers(-1, 40),
    "tools": st.lists(
        st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries(
                    {"name": st.sampled_from(["f", "g"])},
                    optional={
                        "parameters": st.dictionaries(st.sampled_from(["type", "properties", "enum"]), ANYTHING),
                        "strict": st.booleans(),
                        "description": st.text(max_size=5),
                    },
                ),
            }
        ),
        max_size=2,
    ),
    "tool_choice": st.sampled_from(
        ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}, {"type": "allowed_tools"}]
    ),
    "parallel_tool_calls": st.booleans(),
    "thinking_token_budget": st.integers(-1, 3),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["messages", "bos_token", "x"]), ANYTHING, max_size=2),
}
CHAT_BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES},
    optional={
        name: LIKELY_IN_CHAT.get(name, st.nothing()) | ANYTHING
        for name in ChatRequest.model_fields
        if name != "messages"
    }
    | {"some_field": ANYTHING},
)
TRANSLATED = (
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
)
FUZZ = fuzz(60)
pytestmark = pytest.mark.fuzz


@FUZZ
@given(body=BODIES)
def test_likely_bodies_are_answered_or_refused(server: LiveServer, body: dict[str, Any]) -> None:
    answered_or_refused(server.post("/v1/completions", json.dumps(body)), body, "text_completion")


@FUZZ
@given(body=CHAT_BODIES)
def test_likely_conversations_are_answered_or_refused(server: LiveServer, body: dict[str, Any]) -> None:
    answered_or_refused(server.post("/v1/chat/completions", json.dumps(body)), body, "chat.completion")


def answered_or_refused(response: httpx.Response, body: dict[str, Any], kind: str) -> None:
    if response.status_code in (400, 404):
        error_of(response)
    elif body.get("stream"):
        assert all("choices" in chunk for chunk in chunks_of(response))
    else:
        assert response.status_code == 200, response.text
        assert response.json()["object"] == kind


@FUZZ
@given(body=ANYTHING)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", *TRANSLATED])
def test_any_json_is_refused_or_answered(server: LiveServer, path: str, body: Any) -> None:
    assert server.post(path, json.dumps(body)).status_code in (200, 400)


@FUZZ
@given(body=st.binary(max_size=50))
def test_any_bytes_are_refused(server: LiveServer, body: bytes) -> None:
    assert server.post("/v1/completions", body).status_code == 400
