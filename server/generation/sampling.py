"""The request's parameters and the model's own defaults -> `SamplingParams`."""

import secrets

from engine.core.errors import InvalidParameterError
from engine.core.sampling_params import MAX_SEED, SamplingParams
from server.core.tokenizer_protocol import Tokenizer
from server.protocol.generation import GenerationParams
from server.runtime.generation_defaults import GenerationDefaults


def sampling_params(
    request: GenerationParams,
    defaults: GenerationDefaults,
    tokenizer: Tokenizer,
    max_tokens: int,
    grammar: str | None = None,
) -> SamplingParams:
    """Returns the parameters without a seed, which each generation has its own. Raises InvalidParameterError for values
    out of range."""
    top_k = request.top_k if request.top_k is not None else defaults.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_k=0 if top_k == -1 else top_k,
        top_p=_given(request.top_p, defaults.top_p),
        min_p=_given(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias={_token_id(key): bias for key, bias in request.logit_bias.items()},
        allowed_token_ids=None
        if request.allowed_token_ids is None
        else tuple(dict.fromkeys(request.allowed_token_ids)),
        bad_words=tuple(ids for word in request.bad_words for ids in _bad_word_ids(word, tokenizer)),
        grammar=grammar,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
    )


def draw_seed() -> int:
    """Returns a random seed, small enough for clients whose numbers are floats."""
    return secrets.randbits(48)


def seed_of(base: int, index: int) -> int:
    """Returns the seed of the choice with this index. OpenAI's seeds may be negative; the engine's may not."""
    return (base + index) % (MAX_SEED + 1)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise InvalidParameterError("logit_bias", f"logit_bias has the key {key[:20]!r}; keys are token ids.")
    return int(key)


def _bad_word_ids(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    ids = tokenizer.bad_word_ids(word)
    if not ids:
        raise InvalidParameterError("bad_words", "bad_words must not contain a word without tokens.")
    return ids
