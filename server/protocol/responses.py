"""POST /v1/responses: its request parameters."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from server.protocol.chat import MAX_TOP_LOGPROBS
from server.protocol.generation import SamplingFields, wrong
from server.protocol.response_items import Input
from server.protocol.response_tools import ToolChoice, Tools
from server.protocol.structured import JsonSchemaFormat
from server.protocol.tags import type_of
from server.protocol.typed_streams import TypedStreamFields
from server.protocol.wire import (
    ClosedModel,
    Int32,
    JsonObject,
    StopStrings,
    Text,
    check_serializable,
    entries_at_most,
)

MAX_METADATA = 16
MAX_INCLUDED = 16
LOGPROBS = "message.output_text.logprobs"


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


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
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="A hint without effect.")


class ReasoningConfig(ClosedModel):
    effort: Text | None = Field(None, description="Passed to the chat template, as reasoning_effort.")
    summary: Text | None = Field(None, description="A hint without effect: all of the thinking is returned.")
    generate_summary: Text | None = Field(None, description="An older name of summary.")
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        None, description="A hint without effect: the chat template decides which thinking it shows."
    )
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(ClosedModel):
    include_usage: bool = Field(True, description="No effect: the last event always has the usage.")
    include_obfuscation: Literal[False] = False


class ResponsesRequest(SamplingFields, TypedStreamFields):
    input: Input
    instructions: Text | None = None
    max_output_tokens: Int32 | None = Field(None, ge=1, description="Default: as many as fit the context.")
    stop: StopStrings = Field([])
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED, fail_fast=True)] = Field(
        [], description="Hints, but for the logprobs: there is nothing encrypted and nothing of built-in tools."
    )
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description=f"Needs include: {LOGPROBS}.")
    tools: Tools = Field([], description="Functions, custom tools and namespaces of them; built-in ones are left out.")
    tool_choice: ToolChoice = "auto"
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
    service_tier: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponsesRequest":
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
