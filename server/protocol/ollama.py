"""Ollama's API: the bodies of /api/chat and /api/generate, and the answers of all its endpoints."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.answers import Timings
from server.protocol.generation import MAX_TEMPERATURE, wrong
from server.protocol.messages import MAX_MESSAGES, MAX_TOOL_CALLS, bounded_parts
from server.protocol.refusals import REFUSED_EVERYWHERE
from server.protocol.request import RequestFields
from server.protocol.tools import MAX_TOOLS, Tool
from server.protocol.typed_streams import TypedStreamFields
from server.protocol.wire import (
    ClosedModel,
    Int32,
    Int64,
    JsonObject,
    ResumeTokenIds,
    StopStrings,
    Text,
    WireModel,
    bounded_size,
)

_OTHER_SAMPLER = "is not supported: use temperature, top_k, top_p and min_p"


def _only(neutral: Any, reason: str) -> AfterValidator:
    """Returns a validator that refuses every value but the one that asks for nothing."""

    def check(value: Any) -> Any:
        if value != neutral:
            raise PydanticCustomError("rule", reason)
        return value

    return AfterValidator(check)


class OllamaOptions(ClosedModel):
    """Parameters of the model. Those without effect say how Ollama loads one; here that is settled at the start."""

    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_k: Int32 | None = Field(None, description="0 or -1 keeps all tokens.")
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    num_predict: Int32 | None = Field(None, ge=-2, description="-1, -2 and by default: as many tokens as fit.")
    stop: StopStrings = Field([])
    repeat_penalty: float | None = Field(None, description="Counts all tokens, of the prompt, too.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Annotated[Int32, _only(-1, "must be -1: penalties count all tokens")] | None = None
    typical_p: Annotated[float, _only(1, _OTHER_SAMPLER)] | None = None
    tfs_z: Annotated[float, _only(1, _OTHER_SAMPLER)] | None = None
    mirostat: Annotated[Int32, _only(0, _OTHER_SAMPLER)] | None = None
    penalize_newline: Annotated[bool, _only(True, "must be true: penalties count all tokens")] | None = None
    mirostat_tau: float | None = Field(None, description="No effect: mirostat must be 0.")
    mirostat_eta: float | None = Field(None, description="No effect: mirostat must be 0.")
    num_keep: Int32 | None = Field(None, description="No effect: a context that is full ends the answer.")
    num_ctx: Int32 | None = Field(None, description="No effect.")
    num_batch: Int32 | None = Field(None, description="No effect.")
    num_gpu: Int32 | None = Field(None, description="No effect.")
    main_gpu: Int32 | None = Field(None, description="No effect.")
    num_thread: Int32 | None = Field(None, description="No effect.")
    numa: bool | None = Field(None, description="No effect.")
    low_vram: bool | None = Field(None, description="No effect.")
    f16_kv: bool | None = Field(None, description="No effect.")
    use_mmap: bool | None = Field(None, description="No effect.")
    use_mlock: bool | None = Field(None, description="No effect.")
    logits_all: bool | None = Field(None, description="No effect.")
    vocab_only: bool | None = Field(None, description="No effect.")
    embedding_only: bool | None = Field(None, description="No effect.")

    @model_validator(mode="after")
    def _check_limit(self) -> "OllamaOptions":
        if self.num_predict == 0:
            raise wrong("options.num_predict", "must be at least 1, or -1 for as many tokens as fit")
        return self

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens to generate; None for as many as fit the context."""
        return None if self.num_predict is None or self.num_predict < 0 else self.num_predict


def _no_images(images: Any) -> Any:
    if images not in (None, []):
        raise PydanticCustomError("rule", "is not supported: the model reads text only")
    return []


NoImages = Annotated[list[Text], Field(max_length=0), BeforeValidator(_no_images)]


class OllamaFunctionCall(WireModel):
    name: Text
    arguments: JsonObject = Field({})


class OllamaCall(WireModel):
    """A call in a conversation's history, as this API's answers have them."""

    id: Text | None = None
    function: OllamaFunctionCall


class OllamaMessage(WireModel):
    """A message. Fields that are not defined here reach the chat template: some templates have their own."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    images: NoImages = Field([])
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] = Field([])
    tool_name: Text | None = Field(None, description="Of the role tool: whose result it is.")
    tool_call_id: Text | None = Field(None, description="Of the role tool: the call whose result it is.")


def _json_alone(word: Any) -> Any:
    if word not in ("", "json"):
        raise PydanticCustomError("format", 'Input should be "json" or a JSON schema')
    return word


Format = Annotated[
    Annotated[Literal["", "json"], BeforeValidator(_json_alone), Tag("<word>")]
    | Annotated[JsonObject, Tag("<schema>")],
    Discriminator(lambda value: "<schema>" if isinstance(value, dict) else "<word>"),
]


Think = Annotated[
    Annotated[bool, Tag("<switch>")] | Annotated[Literal["low", "medium", "high"], Tag("<effort>")],
    Discriminator(lambda value: "<effort>" if isinstance(value, str) else "<switch>"),
]


class OllamaGeneration(RequestFields, TypedStreamFields):
    """What /api/chat and /api/generate share."""

    stream: bool = True
    format: Format | None = Field(None, description='"json" for a JSON object, or a schema that the answer satisfies.')
    options: OllamaOptions = OllamaOptions()
    think: Think | None = Field(None, description="Default: the model decides.")
    keep_alive: Any = Field(None, description="No effect: the model stays loaded.")
    truncate: bool = Field(True, description="No effect: a conversation that does not fit is refused.")
    shift: bool = Field(True, description="No effect: a context that is full ends the answer.")
    resume_token_ids: ResumeTokenIds = Field([], description="As of completions, of one choice.")


class OllamaChatRequest(OllamaGeneration):
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True), bounded_parts] = Field(
        [], description="Without any, nothing is generated: the model is loaded."
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), bounded_size] = Field([])


class OllamaGenerateRequest(OllamaGeneration):
    prompt: Text = Field("", description="Without any, nothing is generated: the model is loaded.")
    system: Text = ""
    raw: bool = Field(False, description="The prompt is tokenized as it is, without the chat template.")

    @model_validator(mode="after")
    def _check_raw(self) -> "OllamaGenerateRequest":
        if self.raw and self.system:
            raise wrong("system", "cannot be combined with raw, where there is no template")
        if self.raw and self.think is not None:
            raise wrong("think", "cannot be combined with raw, where there is no template")
        return self


_OWN = {
    **{name: f"belongs into options, as options.{name}" for name in OllamaOptions.model_fields},
    "template": "is not supported: the model's own chat template is used",
    "suffix": "is not supported: the model completes to the right only",
    "context": "is not supported: send the whole conversation to /api/chat",
    "images": "is not supported: the model reads text only",
    "logprobs": "is not supported here: ask /v1/chat/completions",
    "top_logprobs": "is not supported here: ask /v1/chat/completions",
    "width": "is not supported: the model writes text only",
    "height": "is not supported: the model writes text only",
    "steps": "is not supported: the model writes text only",
}
OLLAMA_REFUSALS: Mapping[str, str] = {**REFUSED_EVERYWHERE, **_OWN}


class ShowRequest(WireModel):
    model_config = ConfigDict(extra="ignore")

    model: Text | None = None
    name: Text | None = Field(None, description="The older name of model.")
    verbose: bool = Field(False, description="No effect.")


class Durations(BaseModel):
    """Durations of the whole answer, in the line that ends it, as nanoseconds; those that are zero are left out."""

    total_duration: int | None = None
    load_duration: int | None = None
    """Until the request was scheduled."""
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    """From then to the first token."""
    eval_count: int | None = None
    eval_duration: int | None = None
    """From the first token to the last."""
    timings: Timings | None = None


class _Line(Durations):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None


class AnsweredFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class AnsweredCall(BaseModel):
    id: str
    function: AnsweredFunction


class AnsweredMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class OllamaChatAnswer(_Line):
    message: AnsweredMessage


class OllamaGenerateAnswer(_Line):
    response: str
    thinking: str | None = None


class OllamaError(BaseModel):
    error: str


class ModelDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class LoadedModel(BaseModel):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class LoadedModels(BaseModel):
    models: list[LoadedModel]


class ModelDescription(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    version: str
