"""Prompts of chats without answers: what /v1/chat/completions/render and /tokenize return and refuse."""

from typing import Any

import pytest

from tests.server.byte_tokenizer import BOS, NUM_PROMPT_TOKENS, PROMPT
from tests.server.events import error_of
from tests.server.live_server import LiveServer


class TestRender:
    def test_it_returns_the_prompt_and_generates_nothing(self, server: LiveServer) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert server.post_json("/v1/chat/completions/render", body).json() == {
            "prompt": f"<s>{PROMPT}",
            "prompt_token_ids": [BOS, *PROMPT.encode()],
            "count": NUM_PROMPT_TOKENS,
            "max_tokens": 512 - NUM_PROMPT_TOKENS,
            "max_model_len": 512,
        }
        assert server.engine.requests == []

    def test_it_refuses_what_generating_would_refuse(self, server: LiveServer) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": -1}
        assert error_of(server.post_json("/v1/chat/completions/render", body))["param"] == "temperature"

    def test_tokenize_counts_the_same(self, server: LiveServer) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        tokens = server.post_json("/tokenize", body | {"return_token_strs": True}).json()
        assert (tokens["count"], tokens["tokens"]) == (NUM_PROMPT_TOKENS, [BOS, *PROMPT.encode()])
        assert "".join(tokens["token_strs"]) == f"<s>{PROMPT}"
        cut = server.post_json("/tokenize", body | {"add_generation_prompt": False}).json()
        assert cut["tokens"] == [BOS, *b"[user]Hi"]

    @pytest.mark.parametrize(
        ("param", "extra"),
        [
            ("messages.0.role", {"messages": [{"role": "x"}]}),
            ("add_generation_prompt", {"continue_final_message": True, "add_generation_prompt": True}),
            ("chat_template", {"chat_template": "x"}),
            ("truncate_prompt_tokens", {"truncate_prompt_tokens": 1}),
        ],
    )
    def test_tokenize_names_what_is_wrong(self, server: LiveServer, param: str, extra: dict[str, Any]) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], **extra}
        assert error_of(server.post_json("/tokenize", body))["param"] == param

    @pytest.mark.parametrize("body", [{}, {"prompt": "Hi", "messages": []}, {"prompt": None}])
    def test_tokenize_takes_one_of_two(self, server: LiveServer, body: dict[str, Any]) -> None:
        refused = server.post_json("/tokenize", body)
        assert refused.status_code == 400 and "prompt or messages must be given, and not both" in refused.text

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "Hi", "truncate_prompt_tokens": 1}),
            ("/detokenize", {"tokens": [1], "prompt": "Hi"}),
        ],
    )
    def test_nothing_is_taken_and_then_ignored(self, server: LiveServer, path: str, body: dict[str, Any]) -> None:
        refused = server.post_json(path, body)
        assert (refused.status_code, error_of(refused)["param"]) == (400, list(body)[1])
