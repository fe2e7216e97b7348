"""POST /v1/completions: its parameters, OpenAI's and the extensions, and its answers."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.prompts import Prompts
from server.protocol.wire import Int32, Int64, StopStrings, Text, Texts, TokenIds, WireModel

MAX_CHOICES = 128


class StreamOptions(WireModel):
    include_usage: bool = False
    """A last chunk without choices tells the token counts."""
    continuous_usage_stats: bool = False
    """Every chunk tells the token counts so far."""


class CompletionRequest(WireModel):
    """Values are checked for type here and for range where they are used. Fields beyond these: `protocol.refusals`."""

    model_config = ConfigDict(extra="allow")

    prompt: Prompts
    model: Text | None = Field(None, description="A name from /v1/models; may be left out.")
    max_tokens: Int32 = Field(16, description="0 is allowed with echo or prompt_logprobs: the prompt is only scored.")
    temperature: float | None = None
    top_p: float | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Candidates, ranked by mean logprob.")
    stop: StopStrings = Field([])
    seed: Int64 | None = Field(None, description="The choice with index i uses seed + i. Drawn and reported if absent.")
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = Field({}, description="Token ids, as strings, to what is added to their logits.")
    logprobs: Int32 | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: Int32 | None = Field(None, description="0 or -1 keeps all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = Field([])
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    bad_words: Texts = Field([])
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = Field(False, description='Tokens in logprobs are written "token_id:123".')
    truncate_prompt_tokens: Int32 | None = Field(
        None, ge=-1, description="Keep this many tokens from the prompt's end; -1 as many as fit beside max_tokens."
    )
    priority: Int32 = Field(0, description="Lower runs first.")
    cache_salt: Text = Field("", max_length=1024, description="Prefixes are shared only among equal salts.")
    request_id: Text | None = Field(None, description="Part of the response's id.")

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionRequest":
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "is only allowed with stream")
        if self.best_of is not None and self.best_of < self.n:
            raise _wrong("best_of", "must not be less than n")
        if self.stream and self.num_candidates != self.n:
            raise _wrong("best_of", "cannot be streamed: candidates are ranked when all are complete")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise _wrong("max_tokens", "must be at least 1, unless echo or prompt_logprobs is given")
        return self

    @property
    def num_candidates(self) -> int:
        """Sequences to generate per prompt, of which the best `n` are returned."""
        return self.best_of or self.n


def _wrong(param: str, rule: str) -> PydanticCustomError:
    """Errors of the whole model have no location: `param` in the context names the field at fault."""
    return PydanticCustomError("combination", "{param} {rule}", {"param": param, "rule": rule})


class Logprobs(BaseModel):
    """Four lists of the same length, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(BaseModel):
    """Where the time went. queue + prefill = ttft; ttft + decode = e2e."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    itl_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_chunks: int
    preemptions: int


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


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
    """Streamed as events, each with the choices' news in `choices`."""

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
