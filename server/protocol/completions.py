"""POST /v1/completions: its parameters beyond those of `protocol.generation`, and its response models."""

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from server.protocol.answers import PromptLogprob, Timings, Usage
from server.protocol.generation import MAX_CHOICES, GenerationParams, wrong
from server.protocol.prompts import Prompts
from server.protocol.wire import Int32

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationParams):
    prompt: Prompts
    max_tokens: Int32 | None = Field(
        None,
        description=f"Default: {DEFAULT_MAX_TOKENS}, or as many as fit the context. 0 is allowed with echo or "
        "prompt_logprobs: the prompt is only scored.",
    )
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Candidates, ranked by mean logprob.")
    logprobs: Int32 | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionRequest":
        self.check_stream_options()
        if self.best_of is not None and self.best_of < self.n:
            raise wrong("best_of", "must not be less than n")
        if self.stream and self.num_candidates != self.n:
            raise wrong("best_of", "cannot be streamed: candidates are ranked when all are complete")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise wrong("max_tokens", "must be at least 1, unless echo or prompt_logprobs is given")
        return self

    def max_tokens_behind(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Returns how many tokens to generate at most. Behind a prompt that fills the context that is one by default,
        so that the prompt is refused as too long."""
        if self.max_tokens is not None:
            return self.max_tokens
        return min(DEFAULT_MAX_TOKENS, max(1, max_model_len - num_prompt_tokens))

    @property
    def num_candidates(self) -> int:
        """Sequences to generate per prompt, of which the best `n` are returned."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to score beside each generated token. Candidates are ranked by their logprobs, which are then
        computed even if the request does not ask for them."""
        if self.logprobs is None and self.num_candidates > self.n:
            return 0
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to score beside each prompt token: as many as for the completion with `echo`, or as many as
        `prompt_logprobs` asks for, if that is more."""
        wanted = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((count for count in wanted if count is not None), default=None)


class Logprobs(BaseModel):
    """Four lists of the same length, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """The whole completion. A stream sends events of the same shape: `choices` has what is new."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    metrics: dict[str, Any] | None = None
