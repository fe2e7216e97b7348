"""Every parameter of the contract either works in a chat, or is refused by its name, or means nothing to generation."""

from contextlib import suppress
from typing import Any

import pytest

from server.protocol.chat import ChatRequest
from server.protocol.refusals import CHAT_REFUSALS, WITHOUT_EFFECT
from tests.server.byte_tokenizer import BOS
from tests.server.contract import EXTENSIONS, OPENAI, STREAMED, WORKING, Works
from tests.server.events import chunks_of, error_of, first
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer, live_server

ONLY_IN_COMPLETIONS = {"prompt", "best_of", "suffix"}
FINAL = {"role": "assistant", "content": "So "}
MESSAGES = [{"role": "user", "content": "Hi"}]
NUM_PROMPT_TOKENS = 20


def text(body: dict[str, Any]) -> str:
    content: str = first(body)["message"]["content"]
    return content


# Parameters whose effect is seen elsewhere than in completions; the engine generates "a<eos>b", then letters.
OF_CHAT = {
    "messages": Works([FINAL], lambda request, _: b"So " in bytes(request.prompt_token_ids[1:])),
    "max_completion_tokens": Works(1, lambda _, body: body["usage"]["completion_tokens"] == 1),
    "logprobs": Works(True, lambda _, body: first(body)["logprobs"]["content"][0]["token"] == "a"),
    "top_logprobs": Works(
        2, lambda _, body: len(first(body)["logprobs"]["content"][0]["top_logprobs"]) == 2, {"logprobs": True}
    ),
    "echo": Works(True, lambda _, body: text(body) == "So a", {"messages": [FINAL], "continue_final_message": True}),
    "add_generation_prompt": Works(False, lambda request, _: len(request.prompt_token_ids) == 9),
    "continue_final_message": Works(
        True, lambda request, _: bytes(request.prompt_token_ids[-4:]) == b"]So ", {"messages": [FINAL]}
    ),
    "chat_template_kwargs": Works({"bos_token": ""}, lambda request, _: request.prompt_token_ids[0] != BOS),
    "add_special_tokens": Works(True, lambda request, _: request.prompt_token_ids[:2] == [BOS, BOS]),
    "min_tokens": Works(3, lambda _, body: text(body).startswith("ab"), {"max_tokens": 9}),
    "ignore_eos": Works(True, lambda _, body: body["usage"]["completion_tokens"] == 512 - NUM_PROMPT_TOKENS),
    "include_stop_str_in_output": Works(True, lambda _, body: text(body) == "a", {"stop": "a"}),
    "skip_special_tokens": Works(False, lambda _, body: "a</s>b" in text(body), {"ignore_eos": True, "max_tokens": 9}),
    "prompt_logprobs": Works(1, lambda _, body: body["prompt_logprobs"][8]["105"]["rank"] == 9),
    "return_token_ids": Works(
        True,
        lambda _, body: len(body["prompt_token_ids"]) == NUM_PROMPT_TOKENS and first(body)["token_ids"] == [97, 257],
    ),
    "response_format": Works({"type": "json_object"}, lambda request, _: "object" in (request.params.grammar or "")),
    "structured_outputs": Works({"regex": "a+"}, lambda request, _: request.params.grammar == "start: /a+/"),
    "return_tokens_as_token_ids": Works(
        True, lambda _, body: first(body)["logprobs"]["content"][0]["token"] == "token_id:97", {"logprobs": True}
    ),
    "truncate_prompt_tokens": Works(1, lambda request, _: request.prompt_token_ids == [ord("]")]),
    "request_id": Works("mine", lambda _, body: body["id"] == "chatcmpl-mine"),
}
WORKING_IN_CHAT = {name: works for name, works in WORKING.items() if name not in ONLY_IN_COMPLETIONS} | OF_CHAT
# Parameters that the tests of templates cover.
OF_TEMPLATES = {"chat_template", "documents"}
# Parameters that the tests of calls and thinking cover.
OF_TOOLS = {"tools", "tool_choice", "parallel_tool_calls", "thinking_token_budget", "reasoning_effort"}


def ask(server: LiveServer, **parameters: Any) -> dict[str, Any]:
    server.engine.rule = lambda request, i: [97, 257, 98][i] if i < 3 else 99
    response = server.chat(**{"messages": MESSAGES, **parameters})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("name", [*OPENAI, *EXTENSIONS])
def test_no_parameter_of_the_contract_is_ignored_in_silence(name: str) -> None:
    known = WORKING_IN_CHAT.keys() | STREAMED | OF_TEMPLATES | OF_TOOLS
    assert sum((name in known, name in CHAT_REFUSALS, name in WITHOUT_EFFECT)) == 1


def test_every_parameter_that_is_defined_is_in_the_contract() -> None:
    assert set(ChatRequest.model_fields) == WORKING_IN_CHAT.keys() | STREAMED | OF_TEMPLATES | OF_TOOLS


@pytest.mark.parametrize("name", WORKING_IN_CHAT)
def test_parameters_work(server: LiveServer, name: str) -> None:
    works = WORKING_IN_CHAT[name]
    body = ask(server, **{**(works.beside or {}), name: works.value})
    assert works.check(server.engine.requests[0], body), body


@pytest.mark.parametrize("name", sorted(WORKING_IN_CHAT.keys() - {"model"}))
def test_parameters_matter(server: LiveServer, name: str) -> None:
    """Without the parameter its check fails: the parameter makes the difference."""
    works = WORKING_IN_CHAT[name]
    body = ask(server, **(works.beside or {}))
    with suppress(KeyError, TypeError):
        assert not works.check(server.engine.requests[0], body)


@pytest.mark.parametrize("name", sorted(WORKING_IN_CHAT.keys() | OF_TEMPLATES | OF_TOOLS))
@pytest.mark.parametrize("stream", [False, True])
def test_explicit_nulls_count_as_absent(server: LiveServer, name: str, stream: bool) -> None:
    response = server.chat(**{"messages": MESSAGES, "stream": stream, "max_tokens": 1, name: None})
    if name == "messages":
        assert error_of(response)["param"] == "messages"
    else:
        assert response.status_code == 200


@pytest.mark.parametrize("name", CHAT_REFUSALS)
def test_what_is_not_supported_is_refused_by_name(server: LiveServer, name: str) -> None:
    response = server.chat("Hi", **{name: {"some": "value"}})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(name) and server.engine.requests == []


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_bookkeeping_is_accepted(server: LiveServer, name: str) -> None:
    assert server.chat("Hi", max_tokens=1, **{name: {"some": "value"}}).status_code == 200


@pytest.mark.parametrize(
    "parameters", [{"function_call": "none"}, {"functions": []}, {"modalities": ["text"]}, {"best_of": 1}]
)
def test_values_that_ask_for_nothing_are_accepted(server: LiveServer, parameters: dict[str, Any]) -> None:
    assert server.chat("Hi", max_tokens=1, **parameters).status_code == 200


def test_streaming_streams(server: LiveServer) -> None:
    server.engine.rule = saying("ab")
    assert len(chunks_of(server.chat("Hi", stream=True))) == 3
    assert error_of(server.chat("Hi", stream_options={"include_usage": True}))["param"] == "stream_options"


def test_too_many_choices_are_refused() -> None:
    with live_server(max_num_seqs=1, max_waiting=2) as server:
        assert error_of(server.chat("Hi", n=4))["param"] == "n"
