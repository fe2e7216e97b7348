"""Request validation: refuses, once and by the parameter's name, what this engine can never run; torch-free.

Code behind it trusts its input.
"""

from collections.abc import Collection, Sequence

from engine.core.config import EngineInfo
from engine.core.errors import ContextLengthError, InvalidParameterError
from engine.core.sampling_params import SamplingParams


def check_request(info: EngineInfo, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidParameterError or ContextLengthError unless the request can run to its end."""
    _check_length(info, len(prompt_token_ids), params.max_tokens)
    _check_ids(info, "prompt", prompt_token_ids)
    _check_ids(info, "logit_bias", params.logit_bias)
    _check_ids(info, "stop_token_ids", params.stop_token_ids)
    _check_ids(info, "allowed_token_ids", params.allowed_token_ids or ())
    _check_ids(info, "prediction", params.predicted_token_ids)
    if params.thinking is not None:
        ids = (params.thinking.start_id, params.thinking.end_id)
        _check_ids(info, "thinking_token_budget", [token_id for token_id in ids if token_id is not None])
    for word in params.bad_words:
        _check_ids(info, "bad_words", word)


def check_given(info: EngineInfo, token_ids: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidParameterError unless an answer of these parameters can begin with these tokens."""
    _check_ids(info, "resume_token_ids", token_ids)
    if len(token_ids) > params.max_tokens:
        raise InvalidParameterError("resume_token_ids", "resume_token_ids has more tokens than the answer may have.")
    if token_ids and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise InvalidParameterError("resume_token_ids", "resume_token_ids cannot be combined with log-probabilities.")


def _check_length(info: EngineInfo, num_prompt_tokens: int, max_tokens: int) -> None:
    if num_prompt_tokens == 0:
        raise InvalidParameterError("prompt", "The prompt must contain at least one token.")
    total = num_prompt_tokens + max_tokens
    if total > info.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested {total} "
            f"tokens ({num_prompt_tokens} in the prompt, {max_tokens} in max_tokens). Shorten either."
        )


def _check_ids(info: EngineInfo, param: str, token_ids: Collection[int]) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
        raise InvalidParameterError(param, f"{param} has a token id outside the vocabulary [0, {info.vocab_size}).")
