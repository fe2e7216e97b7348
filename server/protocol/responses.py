"""POST /v1/responses: its request parameters."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.chat import MAX_TOP_LOGPROBS
from server.protocol.generation import SamplingFields, wrong
from server.protocol.response_items import Input
from server.protocol.structured import JsonSchemaFormat
from server.protocol.tags import choice_tag, type_of
from server.protocol.tools import MAX_TOOLS, Function, FunctionName, Kind
from server.protocol.wire import (
    ClosedModel,
    Int32,
    JsonObject,
    StopStrings,
    Text,
    WireModel,
    bounded_size,
    check_serializable,
    entries_at_most,
)

MAX_METADATA = 16
MAX_INCLUDED = 16
LOGPROBS = "message.output_text.logprobs"


class _FunctionType(WireModel):
    type: Kind


class FunctionTool(Function, _FunctionType):
    pass


class NamedFunction(FunctionName, _FunctionType):
    pass


class AllowedFunctions(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedFunction, Tag("<named>")]
    | Annotated[AllowedFunctions, Tag("<allowed>")],
    Discriminator(choice_tag),
]


def _check_included(name: Any) -> Any:
    if name == "reasoning.encrypted_content":
        message = f"'{name}' is not supported: thinking is returned as plain text, and nothing is stored"
        raise PydanticCustomError("included", message)
    return name


Included = Annotated[Literal["message.output_text.logprobs"], BeforeValidator(_check_included)]


class PlainFormat(ClosedModel):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchemaFormat):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, AfterValidator(check_serializable)] = Field(alias="schema")  # echoed in the response


TextFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
    Discriminator(lambda value: "<schema>" if type_of(value) == "json_schema" else "<plain>"),
]


class TextConfig(ClosedModel):
    format: TextFormat = PlainFormat(type="text")
    verbosity: Literal["medium"] | None = Field(None, description="Only the default: nothing else is implemented.")


class ReasoningConfig(ClosedModel):
    """Reasoning options, all of which are refused by name: see `check`."""

    effort: Text | None = None
    summary: Text | None = None
    generate_summary: Text | None = None

    def check(self) -> None:
        for name in sorted(self.model_fields_set):
            raise wrong(
                f"reasoning.{name}", "is not supported: the model decides how it thinks, and all of it is returned"
            )


class ResponseStreamOptions(ClosedModel):
    include_usage: bool = Field(True, description="No effect: the last event always has the usage.")
    include_obfuscation: Literal[False] = False


class ResponsesRequest(SamplingFields):
    input: Input
    instructions: Text | None = None
    max_output_tokens: Int32 | None = Field(None, ge=1, description="Default: as many as fit the context.")
    stop: StopStrings = Field([])
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED, fail_fast=True)] = Field([])
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description=f"Needs include: {LOGPROBS}.")
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True), bounded_size] = Field([])
    tool_choice: FunctionChoice = "auto"
    parallel_tool_calls: bool = Field(True, description="false: at most one call.")
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    thinking_token_budget: Int32 | None = Field(
        None, ge=0, description="Thinking ends after this many tokens, if the model has not ended it before."
    )
    chat_template_kwargs: JsonObject = Field({}, description="Variables passed to the chat template.")
    truncation: Literal["disabled", "auto"] = Field("disabled", description="auto is refused.")
    background: bool = Field(False, description="true is refused: nothing is stored.")
    store: bool = Field(True, description="Accepted for OpenAI's clients; nothing is stored.")
    metadata: Annotated[dict[Text, Text], Field(max_length=MAX_METADATA), entries_at_most(MAX_METADATA)] = Field({})
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    service_tier: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponsesRequest":
        self.reasoning.check()
        if self.truncation == "auto":
            raise wrong("truncation", "auto is not supported: an input that is too long is refused")
        if self.background:
            raise wrong("background", "is not supported: nothing is stored")
        if self.top_logprobs and LOGPROBS not in self.include:
            raise wrong("top_logprobs", f'needs include: ["{LOGPROBS}"]')
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if LOGPROBS in self.include else None
