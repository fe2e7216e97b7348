"""Thinking in chat: it is separated from content and counted, and has a budget only where that can be kept."""

from typing import Any

import pytest

from engine.core.thinking_budget import ThinkingBudget
from tests.server.events import chunks_of, error_of, first
from tests.server.fake_engine import saying
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import CALL, WEATHER, saying_tokens
from tests.server.tools.tool_chats import GOLDEN, THINKING, exact_bytes, function


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("chat_thinking.sse", {"stream": True, "stream_options": {"include_usage": True}}), ("chat_thinking.json", {})],
)
def test_the_bytes_of_thinking_are_as_they_were(thinker: LiveServer, name: str, parameters: dict[str, Any]) -> None:
    thinker.engine.rule = saying_tokens(thinker, "<think>hm</think>\n\nYes")
    assert exact_bytes(thinker, **parameters) == (GOLDEN / name).read_bytes()


def test_thinking_is_separated_and_counted(thinker: LiveServer) -> None:
    thinker.engine.rule = saying_tokens(thinker, "<think>hm</think>\n\nYes")
    body = thinker.chat().json()
    assert first(body)["message"]["reasoning_content"] == "hm" and first(body)["message"]["content"] == "Yes"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_thinking_that_the_prompt_began_needs_no_mark(thinker: LiveServer) -> None:
    thinker.engine.rule = saying_tokens(thinker, "hm</think>Yes")
    body = thinker.chat(chat_template_kwargs={"deep": True}).json()
    assert first(body)["message"]["reasoning_content"] == "hm" and first(body)["message"]["content"] == "Yes"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_tokens_of_thinking_count_although_their_text_is_held_back(thinker: LiveServer) -> None:
    """Here each token's text comes with the next one's, because it may begin the stop string."""
    thinker.engine.rule = saying_tokens(thinker, "<think>aaa</think>Yes")
    body = thinker.chat(stop=["aX", "YX", "</think>X"]).json()
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_thinking_of_all_choices_is_counted(thinker: LiveServer) -> None:
    thinker.engine.rule = saying_tokens(thinker, "<think>hm</think>Yes")
    assert thinker.chat(n=2).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_behind_calls_is_counted_too(agent: LiveServer, stream: bool) -> None:
    """Of the special tokens the marks are in the text, and `</s>` is not."""
    asked: dict[str, Any] = {"tools": [function(parameters=WEATHER)], "ignore_eos": True, "stop_token_ids": [ord("!")]}
    agent.engine.rule = saying_tokens(agent, f"<think>a</think>{CALL}</s><think>bb</think>{CALL}!")
    if stream:
        usage = chunks_of(agent.chat(stream=True, stream_options={"include_usage": True}, **asked))[-1]["usage"]
    else:
        usage = agent.chat(**asked).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3 + 4}


def test_a_model_that_does_not_think_has_only_content(server: LiveServer) -> None:
    server.engine.rule = saying("<think>hm</think>Yes")
    body = server.chat().json()
    assert first(body)["message"]["content"] == "<think>hm</think>Yes"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_budget_of_thinking_reaches_the_engine(thinker: LiveServer) -> None:
    thinker.chat(thinking_token_budget=7)
    thinker.chat(thinking_token_budget=0, chat_template_kwargs={"deep": True})
    wanted = [ThinkingBudget(max_tokens=7, start_id=0xFA, end_id=0xFB), ThinkingBudget(max_tokens=0, end_id=0xFB)]
    assert [request.params.thinking for request in thinker.engine.requests] == wanted


def test_a_budget_is_refused_where_it_could_not_be_kept(server: LiveServer) -> None:
    error = error_of(server.chat(thinking_token_budget=7))
    assert error["param"] == "thinking_token_budget" and "does not think" in error["message"]
    with live_server(FakeBackend(chat_templates={"default": THINKING})) as other:
        assert "no tokens" in error_of(other.chat(thinking_token_budget=7))["message"]
        assert error_of(other.chat(thinking_token_budget=-1))["param"] == "thinking_token_budget"


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({}, "--"),
        ({"reasoning_effort": "low"}, "low-True"),
        ({"reasoning_effort": "none"}, "none-False"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none-True"),
    ],
)
def test_the_template_is_told_the_effort(parameters: dict[str, Any], told: str) -> None:
    template = "{{ reasoning_effort or '-' }}-{{ enable_thinking }}"
    with live_server(FakeBackend(chat_templates={"default": template})) as server:
        assert server.chat(max_tokens=1, **parameters).status_code == 200
        assert bytes(server.engine.requests[0].prompt_token_ids).decode() == told


def test_an_effort_that_is_none_is_refused(server: LiveServer) -> None:
    assert error_of(server.chat(reasoning_effort="huge"))["param"] == "reasoning_effort"


def test_thinking_can_be_set() -> None:
    with live_server(reasoning_parser="think") as server:
        server.engine.rule = saying("<think>hm</think>Yes")
        assert first(server.chat().json())["message"]["reasoning_content"] == "hm"
    with live_server(FakeBackend(chat_templates={"default": THINKING}), reasoning_parser="none") as server:
        server.engine.rule = saying("<think>hm</think>Yes")
        assert first(server.chat().json())["message"]["content"] == "<think>hm</think>Yes"
