"""Every parameter of the contract either works, or is refused by its name, or means nothing to generation."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from engine.client import GenerationRequest
from server.protocol.completions import CompletionRequest
from server.protocol.elsewhere import find_stray
from server.protocol.refusals import COMPLETION_REFUSALS, WITHOUT_EFFECT
from tests.server.byte_tokenizer import BOS
from tests.server.events import error_of
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer

OPENAI = """
    model prompt messages max_tokens max_completion_tokens temperature top_p n best_of stop seed frequency_penalty
    presence_penalty logit_bias logprobs top_logprobs echo stream stream_options tools tool_choice parallel_tool_calls
    response_format user metadata store service_tier suffix safety_identifier prompt_cache_key
""".split()
EXTENSIONS = """
    top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens
    add_special_tokens bad_words allowed_token_ids prompt_logprobs return_token_ids return_tokens_as_token_ids
    truncate_prompt_tokens priority cache_salt request_id chat_template chat_template_kwargs add_generation_prompt
    continue_final_message structured_outputs max_queue_ms deadline_ms
""".split()


@dataclass(frozen=True)
class Works:
    """With this value, the engine's request or the response's body is as the check says."""

    value: Any
    check: Callable[[GenerationRequest, dict[str, Any]], bool]
    beside: dict[str, Any] | None = None


def reaches(name: str, value: Any, expected: Any = None) -> Works:
    wanted = value if expected is None else expected
    return Works(value, lambda request, _: getattr(request.params, name) == wanted)


def first(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = body["choices"][0]
    return choice


# The engine says "a<eos>b", then letters.
WORKING = {
    "model": Works("fake", lambda _, body: body["model"] == "fake"),
    "prompt": Works("Yo", lambda request, _: request.prompt_token_ids == [BOS, 89, 111]),
    "max_tokens": Works(1, lambda _, body: body["usage"]["completion_tokens"] == 1),
    "temperature": reaches("temperature", 0.5),
    "top_p": reaches("top_p", 0.5),
    "n": Works(2, lambda _, body: len(body["choices"]) == 2),
    "best_of": Works(2, lambda _, body: body["usage"]["completion_tokens"] == 4),
    "stop": Works("a", lambda _, body: first(body)["stop_reason"] == "a"),
    "seed": reaches("seed", 77),
    "frequency_penalty": reaches("frequency_penalty", 0.5),
    "presence_penalty": reaches("presence_penalty", -0.5),
    "logit_bias": reaches("logit_bias", {"65": 3, "66": -100.0}, {65: 3.0, 66: -100.0}),
    "logprobs": Works(1, lambda _, body: first(body)["logprobs"]["tokens"] == ["a", "</s>"]),
    "echo": Works(True, lambda _, body: first(body)["text"] == "Hia"),
    "top_k": reaches("top_k", 5),
    "min_p": reaches("min_p", 0.1),
    "repetition_penalty": reaches("repetition_penalty", 1.5),
    "min_tokens": Works(3, lambda _, body: first(body)["text"].startswith("ab"), {"skip_special_tokens": True}),
    "ignore_eos": Works(True, lambda _, body: body["usage"]["completion_tokens"] == 16),
    "stop_token_ids": Works([97], lambda _, body: first(body)["stop_reason"] == 97),
    "include_stop_str_in_output": Works(True, lambda _, body: first(body)["text"] == "a", {"stop": "a"}),
    "skip_special_tokens": Works(False, lambda _, body: "a</s>b" in first(body)["text"], {"ignore_eos": True}),
    "add_special_tokens": Works(False, lambda request, _: request.prompt_token_ids == [72, 105]),
    "bad_words": reaches("bad_words", ["no"], ((110, 111),)),
    "allowed_token_ids": reaches("allowed_token_ids", [65, 66], (65, 66)),
    "prompt_logprobs": Works(1, lambda _, body: first(body)["prompt_logprobs"][2]["105"]["rank"] == 9),
    "return_token_ids": Works(
        True, lambda _, body: (first(body)["prompt_token_ids"], first(body)["token_ids"]) == ([BOS, 72, 105], [97, 257])
    ),
    "response_format": Works({"type": "json_object"}, lambda request, _: "object" in (request.params.grammar or "")),
    "structured_outputs": Works({"regex": "a+"}, lambda request, _: request.params.grammar == "start: /a+/"),
    "return_tokens_as_token_ids": Works(
        True, lambda _, body: first(body)["logprobs"]["tokens"] == ["token_id:97", "token_id:257"], {"logprobs": 0}
    ),
    "truncate_prompt_tokens": Works(1, lambda request, _: request.prompt_token_ids == [105]),
    "priority": Works(-3, lambda request, _: request.priority == -3),
    "cache_salt": Works("s", lambda request, _: request.cache_salt == "s"),
    "max_queue_ms": Works(1500, lambda request, _: request.max_queue_s == 1.5),
    "deadline_ms": Works(2500, lambda request, _: request.deadline_s == 2.5),
    "request_id": Works("mine", lambda _, body: body["id"] == "cmpl-mine"),
}
STREAMED = {"stream", "stream_options"}


CHAT_ONLY = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
}


@pytest.mark.parametrize("name", [*OPENAI, *EXTENSIONS])
def test_no_parameter_of_the_contract_is_ignored_in_silence(name: str) -> None:
    ways = [name in WORKING | dict.fromkeys(STREAMED), name in COMPLETION_REFUSALS, name in WITHOUT_EFFECT]
    assert sum(ways) == (0 if name in CHAT_ONLY else 1)
    assert find_stray(CompletionRequest, {name: "x"}) is not None or name not in CHAT_ONLY


def test_every_parameter_that_is_defined_is_in_the_contract() -> None:
    assert set(CompletionRequest.model_fields) == WORKING.keys() | STREAMED


@pytest.mark.parametrize("name", WORKING)
def test_parameters_work(server: LiveServer, name: str) -> None:
    works = WORKING[name]
    server.engine.rule = lambda request, i: [97, 257, 98][i] if i < 3 else 99
    response = server.complete(**{"prompt": "Hi", **(works.beside or {}), name: works.value})
    assert response.status_code == 200, response.text
    assert works.check(server.engine.requests[0], response.json()), response.text


@pytest.mark.parametrize("name", WORKING)
def test_parameters_matter(server: LiveServer, name: str) -> None:
    """Without the parameter its check fails: it is the parameter that makes the difference."""
    works = WORKING[name]
    if name == "model":
        return
    server.engine.rule = lambda request, i: [97, 257, 98][i] if i < 3 else 99
    body = server.complete(**{"prompt": "Hi", **(works.beside or {})}).json()
    with suppress(KeyError, TypeError):
        assert not works.check(server.engine.requests[0], body)


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("stream", [False, True])
def test_explicit_nulls_count_as_absent(server: LiveServer, name: str, stream: bool) -> None:
    if name == "prompt":
        assert error_of(server.complete(None))["param"] == "prompt"
    else:
        assert server.complete("Hi", stream=stream, **{name: None}).status_code == 200


@pytest.mark.parametrize("name", COMPLETION_REFUSALS)
def test_what_is_not_supported_is_refused_by_name(server: LiveServer, name: str) -> None:
    response = server.complete("Hi", **{name: {"some": "value"}})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(name)
    assert server.engine.requests == []


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_bookkeeping_is_accepted(server: LiveServer, name: str) -> None:
    assert server.complete("Hi", **{name: {"some": "value"}}).status_code == 200


@pytest.mark.parametrize("field", [{"suffix": ""}, {"response_format": {"type": "text"}}, {"tools": []}])
def test_what_asks_for_nothing_is_no_reason_to_refuse(server: LiveServer, field: dict[str, Any]) -> None:
    assert server.complete("Hi", **field).status_code == 200


def test_a_field_that_nobody_defines_is_ignored_with_one_log_line(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="twostep.server"):
        unknown: dict[str, Any] = {"frobnicate": 1, "new\nline": 2}
        assert server.complete("Hi", **unknown).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert "'frobnicate'" in line and "\n" not in line


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_is_off_with_zero_and_minus_one(server: LiveServer, top_k: int) -> None:
    server.complete("Hi", top_k=top_k)
    assert server.engine.requests[0].params.top_k == 0


def test_truncation_may_keep_what_fits(server: LiveServer) -> None:
    server.complete("x" * 1000, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(server.engine.requests[0].prompt_token_ids) == 502


def test_echo_of_a_cut_prompt_is_what_was_kept(server: LiveServer) -> None:
    server.engine.rule = saying("!")
    body = server.complete("Hello", truncate_prompt_tokens=2, echo=True).json()
    assert first(body)["text"] == "lo!"


def each(name: str, *values: Any) -> list[tuple[str, Any]]:
    return [(name, value) for value in values]


WRONG: list[tuple[str, Any]] = [
    *each("temperature", "1", True, -0.1, 1e400, [1], {}),
    *each("top_p", 0, 1.1, "x"),
    *each("top_k", -2, 1.5, 10**30),
    *each("min_p", -0.1, 1.1),
    *each("max_tokens", -1, 1.0, "3", True, 10**30, 10**400),
    *each("min_tokens", -1, 17),
    *each("n", 0, 129, True),
    *each("best_of", 0, 129),
    *each("stop", 1, [1], [""], "", "nu\0ll", ["x"] * 65, {"a": "b"}),
    *each("seed", 2**63, -(2**63) - 1, 1.5),
    *each("frequency_penalty", 2.1, -2.1),
    *each("presence_penalty", 2.1, -2.1),
    *each("repetition_penalty", 0, -1, 1e-40, 101),
    *each("logit_bias", {"x": 1}, {"258": 1}, {"1": 101}, {"-1": 1}, {"1": "2"}, [1], {"٣": 1}),
    *each("logprobs", -1, 101, True, "1"),
    *each("prompt_logprobs", -1, 101),
    *each("stop_token_ids", [258], [-1], [1.0], [True], 3, ["1"]),
    *each("allowed_token_ids", [], [258], [2**40]),
    *each("bad_words", [""], "x", [1], ["a\0"]),
    *each("truncate_prompt_tokens", 0, -2),
    *each("priority", 2**31, 0.5),
    *each("cache_salt", 1, "x" * 1025),
    *each("request_id", "a b", "ä", "x" * 129, ""),
    *each("stream_options", {}, 1, {"include_usages": True}, {"include_obfuscation": True}),
    *each("stream", 1, "true"),
    *each("echo", 1, "yes"),
    *each("model", 1, "\ud800"),
    *each("prompt", 1, True, {}, [], "", [[]], [""], ["a", 1], [1, "a"], [[1], "a"], [["a"]], [[1], [None]]),
    *each("prompt", [True], [1.0], [-1], [258], [2**70], ["x"] * 1025, [1] * (2**20 + 1)),
    *each("prompt", "a\0b", ["ok", "\ud800"], "\udfff"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: ascii(value)[:40])
def test_wrong_values_are_refused_by_name(server: LiveServer, name: str, value: Any) -> None:
    special = {"add_special_tokens": False, "prompt": "Hi"}
    response = server.complete(**{**special, name: value})
    assert (response.status_code, error_of(response)["param"]) == (400, name), response.text


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused_by_name(server: LiveServer, literal: str) -> None:
    body = f'{{"prompt": "Hi", "temperature": {literal}}}'
    response = server.post("/v1/completions", body)
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")
