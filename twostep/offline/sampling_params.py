"""Sampling parameters of the Python API: those of the server's requests, with the names and defaults of vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from engine.core.errors import InvalidParameterError
from server.core.validation import problem_of
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is sampled. Raises InvalidParameterError for a value that no answer could follow."""

    n: int = 1
    """Answers to each prompt."""
    temperature: float = 1.0
    """0 takes the most likely token each time."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    """The answer with index i uses seed + i; drawn if None, and told in `RequestOutput.seed`."""
    max_tokens: int | None = 16
    """None for as many as fit the context."""
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    """Most likely tokens to tell the log-probabilities of, beside each token's own."""
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    """What the text must follow: `{"json": schema}`, `{"regex": ...}`, `{"choice": [...]}` or `{"grammar": ...}`."""

    def __post_init__(self) -> None:
        validated(CompletionRequest, prompt="", **self.completion_fields())

    def completion_fields(self) -> dict[str, Any]:
        """Returns the fields of a completion request."""
        values = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        if self.logit_bias is not None:
            values["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def chat_fields(self) -> dict[str, Any]:
        """Returns the fields of a chat request, which asks for log-probabilities by two."""
        fields = self.completion_fields()
        if self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        return fields


def validated(kind: type[CompletionRequest | ChatRequest] | type[BaseModel], **fields: Any) -> Any:
    """Returns the server's request with these fields. Raises InvalidParameterError, which names the one at fault."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problem = problem_of(error.errors())
        raise InvalidParameterError(problem.param or "prompt", str(problem.detail)) from None
