import math
from typing import Any

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ContextLengthError, InvalidParameterError
from engine.core.request_validation import check_request
from engine.core.sampling_params import SamplingParams
from tests.engine.fakes import VOCAB_SIZE, add, fake_engine, fake_info, run_to_end

INFO = fake_info(num_blocks=10, block_size=4, max_model_len=32)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("allowed_token_ids", ()),
        ("stop", ("a", "")),
        ("bad_words", ((),)),
        ("logprobs", 101),
        ("prompt_logprobs", -1),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(**{param: value})
    assert refused.value.param == param and param in str(refused.value)


@pytest.mark.parametrize(
    "ids", [{"logit_bias": {VOCAB_SIZE: 1.0}}, {"stop_token_ids": (-1,)}, {"allowed_token_ids": (VOCAB_SIZE,)}]
)
def test_ids_outside_the_vocabulary_are_refused_by_name(ids: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        check_request(INFO, [1], SamplingParams(**ids))
    assert refused.value.param == next(iter(ids))


@pytest.mark.parametrize("prompt", [[], [VOCAB_SIZE], [-1]])
def test_impossible_prompts_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        check_request(INFO, prompt, SamplingParams())
    assert refused.value.param == "prompt"


def test_the_context_may_be_filled_but_not_exceeded() -> None:
    check_request(INFO, [1] * 16, SamplingParams(max_tokens=16))
    with pytest.raises(ContextLengthError, match="maximum context length is 32 tokens"):
        check_request(INFO, [1] * 17, SamplingParams(max_tokens=16))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_a_tenant_without_weight_is_refused(weight: float) -> None:
    with pytest.raises(InvalidParameterError, match="weight"):
        add(fake_engine(), "a", weight=weight)


def test_a_salt_may_be_any_string() -> None:
    engine = fake_engine()
    add(engine, "a", cache_salt="\ud800")
    assert run_to_end(engine)["a"]


def test_a_message_keeps_its_tokens() -> None:
    engine, tokens = fake_engine(), [7, 8]
    add(engine, "a", output_token_ids=tokens)
    run_to_end(engine)
    assert tokens == [7, 8]


def test_a_request_id_is_in_use_until_its_request_ends() -> None:
    engine = fake_engine()
    add(engine, "a")
    with pytest.raises(InvalidParameterError) as refused:
        add(engine, "a")
    assert refused.value.param == "request_id"
    engine.abort_requests(["a"])
    add(engine, "a")


@pytest.mark.parametrize(
    "setting", [{"block_size": 0}, {"num_blocks": 0}, {"target_itl_ms": math.nan}, {"dtype": "int8"}, {"device": "tpu"}]
)
def test_settings_that_cannot_work_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(model="m", **setting)
