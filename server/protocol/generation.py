"""The parameters that all generating endpoints share: a field that is added here is accepted by each of them."""

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.prediction import Prediction
from server.protocol.request import RequestFields
from server.protocol.structured import OutputConstraint, ResponseFormat, StructuredOutputs
from server.protocol.wire import (
    AllowedTokenIds,
    BadWords,
    ClosedModel,
    Int32,
    Int64,
    LogitBias,
    ResumeTokenIds,
    StopStrings,
    StopTokenIds,
)

MAX_CHOICES = 128
MAX_TEMPERATURE = 2.0
"""The maximum of OpenAI's APIs."""


class StreamOptions(ClosedModel):
    include_usage: bool | None = Field(None, description="Sends token counts in a last chunk; with false, in none.")
    continuous_usage_stats: bool = Field(False, description="Sends the token counts so far in every chunk.")
    include_obfuscation: Literal[False] = Field(False, description="Chunks are never padded.")

    @property
    def sends_usage_so_far(self) -> bool:
        return self.continuous_usage_stats and self.include_usage is not False


class SamplingFields(RequestFields):
    """Sampling parameters. Values are checked for type here and, mostly, for range where they are used."""

    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = None
    seed: Int64 | None = Field(None, description="The choice with index i uses seed + i. Drawn and reported if absent.")
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: LogitBias = Field({}, description="Maps token ids, as strings, to what is added to their logits.")
    top_k: Int32 | None = Field(None, description="0 or -1 keeps all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 = 0
    ignore_eos: bool = False
    stop_token_ids: StopTokenIds = Field([])
    skip_special_tokens: bool = True
    bad_words: BadWords = Field([])
    allowed_token_ids: AllowedTokenIds | None = None
    resume_token_ids: ResumeTokenIds = Field(
        [],
        description="For each choice in turn, the tokens that its answer begins with, as another server with the "
        "same `system_fingerprint` generated them for the same request and seed. They are sent again, and generation "
        "goes on behind them.",
    )


class GenerationParams(SamplingFields):
    """Sampling parameters, and what the response contains of the output and whether it is streamed."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: StopStrings = Field([])
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = Field(False, description='Tokens in logprobs are written "token_id:123".')
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = Field(
        None, description="Text that much of the answer will be, which is then written faster. It changes no answer."
    )

    @model_validator(mode="after")
    def _check_one_constraint(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.constraint:
            raise wrong("structured_outputs", "cannot be combined with response_format")
        return self

    @property
    def num_candidates(self) -> int:
        """Sequences to generate per prompt."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to score beside each generated token; None scores nothing."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to score beside each prompt token; None scores nothing."""
        return self.prompt_logprobs

    @property
    def constraint(self) -> OutputConstraint | None:
        """What the generated text must follow; None for free text."""
        given = self.structured_outputs or self.response_format
        return None if given is None else given.constraint

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "is only allowed with stream")


def wrong(param: str, rule: str) -> PydanticCustomError:
    """Returns the error of a field that breaks `rule`. Errors of a whole model have no location: the context's `param`
    names the field."""
    return PydanticCustomError("combination", "{param} {rule}", {"param": param, "rule": rule})
