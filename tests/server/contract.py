"""The parameters of the API, and the effect that each has in /v1/completions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.generation_request import GenerationRequest
from tests.server.byte_tokenizer import BOS
from tests.server.events import first

OPENAI = """
    model prompt messages max_tokens max_completion_tokens temperature top_p n best_of stop seed frequency_penalty
    presence_penalty logit_bias logprobs top_logprobs echo stream stream_options tools tool_choice parallel_tool_calls
    response_format prediction user metadata store service_tier suffix safety_identifier prompt_cache_key
    prompt_cache_retention prompt_cache_options
""".split()
EXTENSIONS = """
    top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens
    add_special_tokens bad_words allowed_token_ids prompt_logprobs return_token_ids return_tokens_as_token_ids
    truncate_prompt_tokens truncation_side priority cache_salt request_id chat_template chat_template_kwargs
    add_generation_prompt continue_final_message structured_outputs resume_token_ids max_queue_ms deadline_ms
""".split()


@dataclass(frozen=True)
class Works:
    """A value of a parameter, and a check of the engine's request and the response's body with it."""

    value: Any
    check: Callable[[GenerationRequest, dict[str, Any]], bool]
    beside: dict[str, Any] | None = None


def reaches(name: str, value: Any, expected: Any = None) -> Works:
    wanted = value if expected is None else expected
    return Works(value, lambda request, _: getattr(request.params, name) == wanted)


# The engine generates "a<eos>b", then letters.
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
    "resume_token_ids": Works([[97, 98]], lambda request, _: request.given_token_ids == (97, 98)),
    "response_format": Works({"type": "json_object"}, lambda request, _: "object" in (request.params.grammar or "")),
    "prediction": Works(
        {"type": "content", "content": "ab"}, lambda request, _: request.params.predicted_token_ids == (97, 98)
    ),
    "structured_outputs": Works({"regex": "a+"}, lambda request, _: request.params.grammar == "start: /a+/"),
    "return_tokens_as_token_ids": Works(
        True, lambda _, body: first(body)["logprobs"]["tokens"] == ["token_id:97", "token_id:257"], {"logprobs": 0}
    ),
    "truncate_prompt_tokens": Works(1, lambda request, _: request.prompt_token_ids == [105]),
    "truncation_side": Works(
        "right", lambda request, _: request.prompt_token_ids == [BOS], {"truncate_prompt_tokens": 1}
    ),
    "priority": Works(-3, lambda request, _: request.priority == -3),
    "cache_salt": Works("s", lambda request, _: request.cache_salt == "s"),
    "prompt_cache_key": Works("k", lambda request, _: request.steering.key == "k"),
    "prompt_cache_retention": Works("24h", lambda request, _: request.steering.retain_s == 86400),
    "prompt_cache_options": Works({"ttl": "30m"}, lambda request, _: request.steering.retain_s == 1800),
    "max_queue_ms": Works(1500, lambda request, _: request.max_queue_s == 1.5),
    "deadline_ms": Works(2500, lambda request, _: request.deadline_s == 2.5),
    "request_id": Works("mine", lambda _, body: body["id"] == "cmpl-mine"),
}
STREAMED = {"stream", "stream_options"}
