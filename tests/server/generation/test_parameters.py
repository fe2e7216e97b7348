"""Every parameter of the contract either works, or is refused by its name, or means nothing to generation."""

from contextlib import suppress
from typing import Any

import pytest

from server.protocol.completions import CompletionRequest
from server.protocol.other_endpoints import find_refused
from server.protocol.refusals import COMPLETION_REFUSALS, WITHOUT_EFFECT
from tests.server.byte_tokenizer import BOS
from tests.server.contract import EXTENSIONS, OPENAI, STREAMED, WORKING
from tests.server.events import error_of, first
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer

CHAT_ONLY = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
}


@pytest.mark.parametrize("name", [*OPENAI, *EXTENSIONS])
def test_no_parameter_of_the_contract_is_ignored_in_silence(name: str) -> None:
    ways = [name in WORKING | dict.fromkeys(STREAMED), name in COMPLETION_REFUSALS, name in WITHOUT_EFFECT]
    assert sum(ways) == (0 if name in CHAT_ONLY else 1)
    assert find_refused(CompletionRequest, {name: "x"}, {}) is not None or name not in CHAT_ONLY


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
    """Without the parameter its check fails: the parameter makes the difference."""
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


def test_an_undefined_field_is_ignored_with_one_log_line(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize(("prompt", "kept"), [("Hello", b"He"), (list(b"Hello"), b"He"), (["Hello", "ab"], b"He")])
def test_a_prompt_cut_on_the_right_keeps_its_beginning(server: LiveServer, prompt: Any, kept: bytes) -> None:
    cut = {"truncate_prompt_tokens": 2, "truncation_side": "right", "add_special_tokens": False}
    server.complete(prompt, **cut)
    server.post_json("/v1/embeddings", {"input": prompt, **cut})
    prompts = [bytes(request.prompt_token_ids) for request in server.engine.requests]
    assert prompts[0] == prompts[len(prompts) // 2] == kept


def test_a_chat_cut_on_the_right_keeps_its_beginning(server: LiveServer) -> None:
    cut = {"truncate_prompt_tokens": 7, "truncation_side": "right"}
    server.chat("Hello", max_tokens=1, **cut)
    server.message("Hello", **cut)
    server.respond("Hello", max_output_tokens=1, **cut)
    assert [request.prompt_token_ids for request in server.engine.requests] == [[BOS, *b"[user]"]] * 3


@pytest.mark.parametrize("temperature", [0, 2, 2.0])
def test_temperatures_go_up_to_two(server: LiveServer, temperature: float) -> None:
    assert server.complete("Hi", temperature=temperature).status_code == 200
    assert server.chat("Hi", temperature=temperature, max_tokens=1).status_code == 200
    assert server.respond("Hi", temperature=temperature, max_output_tokens=1).status_code == 200


@pytest.mark.parametrize("temperature", [2.0000001, 100])
def test_a_higher_temperature_is_refused_by_name(server: LiveServer, temperature: float) -> None:
    answers = [
        server.complete("Hi", temperature=temperature),
        server.chat("Hi", temperature=temperature),
        server.respond("Hi", temperature=temperature),
    ]
    assert [(answer.status_code, error_of(answer)["param"]) for answer in answers] == [(400, "temperature")] * 3


def test_whole_numbers_are_whole_numbers(server: LiveServer) -> None:
    """Some clients write every number with a fraction."""
    fields = {"max_tokens": 3.0, "n": 2.0, "seed": 5.0, "top_k": 4.0, "stop_token_ids": [65.0], "deadline_ms": 9e3}
    body = server.complete([72.0, 105], logprobs=1.0, **fields).json()
    params = server.engine.requests[0].params
    assert (params.max_tokens, params.seed, params.top_k, params.stop_token_ids) == (3, 5, 4, (65,))
    assert server.engine.requests[0].prompt_token_ids == [72, 105] and len(body["choices"]) == 2
    assert all(
        type(each) is int for each in (params.max_tokens, params.seed, *server.engine.requests[0].prompt_token_ids)
    )
    chat = server.chat("Hi", max_tokens=5.0, logprobs=True, top_logprobs=2.0).json()
    assert chat["usage"]["completion_tokens"] == 5
    assert server.respond("Hi", max_output_tokens=5.0).json()["usage"]["output_tokens"] == 5
    assert server.message("Hi", max_tokens=5.0).json()["usage"]["output_tokens"] == 5
    assert server.post_json("/detokenize", {"tokens": [72.0, 105.0]}).json() == {"prompt": "Hi"}


def each(name: str, *values: Any) -> list[tuple[str, Any]]:
    return [(name, value) for value in values]


WRONG: list[tuple[str, Any]] = [
    *each("temperature", "1", True, -0.1, 2.01, 1e400, [1], {}),
    *each("top_p", -0.1, 1.1, "x"),
    *each("top_k", -2, 1.5, 10**30),
    *each("min_p", -0.1, 1.1),
    *each("max_tokens", -1, 1.5, "3", True, 10**30, 1e30, 10**400),
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
    *each("stop_token_ids", [258], [-1], [1.5], [True], 3, ["1"]),
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
    *each("truncation_side", "both", 1),
    *each("prompt", [True], [1.5], [1, 1.5], [-1], [258], [2**70], ["x"] * 1025, [1] * (2**20 + 1)),
    *each("prompt", "a\0b", ["ok", "\ud800"], "\udfff"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: ascii(value)[:40])
def test_wrong_values_are_refused_by_name(server: LiveServer, name: str, value: Any) -> None:
    special = {"add_special_tokens": False, "prompt": "Hi"}
    response = server.complete(**{**special, name: value})
    assert (response.status_code, error_of(response)["param"]) == (400, name), response.text


@pytest.mark.parametrize("value", [1, {"a": "b"}])
def test_stop_is_said_to_be_a_string_or_a_list(server: LiveServer, value: object) -> None:
    message = error_of(server.complete("Hi", stop=value))["message"]
    assert message == "stop: Input should be a string or a list of strings."


def test_one_prompt_of_several_is_refused_before_the_others_have_tokens(server: LiveServer) -> None:
    for stream in (False, True):
        response = server.complete([[1], [2], []], stream=stream)
        assert response.status_code == 400 and error_of(response)["param"] == "prompt"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused_by_name(server: LiveServer, literal: str) -> None:
    body = f'{{"prompt": "Hi", "temperature": {literal}}}'
    response = server.post("/v1/completions", body)
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")
