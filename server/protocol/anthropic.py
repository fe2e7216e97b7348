"""POST /v1/messages and /v1/messages/count_tokens: request parameters and response models."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.answers import Timings
from server.protocol.anthropic_blocks import MaybeEmptyText, Turns
from server.protocol.generation import SamplingFields, wrong
from server.protocol.request import RequestFields
from server.protocol.tags import type_of
from server.protocol.tools import MAX_TOOLS, Name, Schema
from server.protocol.wire import MAX_INT32, ClosedModel, Int32, JsonObject, StopStrings, Text, WireModel, bounded_size


def _check_kind(kind: Any) -> Any:
    if kind != "custom" and isinstance(kind, str):
        raise PydanticCustomError("kind", "{kind} is not supported: tools are your own", {"kind": ascii(kind)[:40]})
    return kind


class AnthropicTool(WireModel):
    type: Annotated[Literal["custom"], BeforeValidator(_check_kind)] = "custom"
    name: Name
    description: Text | None = None
    input_schema: Schema
    strict: bool = Field(False, description="Calls satisfy the schema even if they are not required.")


class ToolMode(ClosedModel):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class ToolByName(ClosedModel):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool = False


AnthropicToolChoice = Annotated[
    Annotated[ToolMode, Tag("<mode>")] | Annotated[ToolByName, Tag("<named>")],
    Discriminator(lambda value: "<named>" if type_of(value) == "tool" else "<mode>"),
]


class ThinkingConfig(ClosedModel):
    type: Literal["enabled", "disabled", "adaptive"] = Field(description="With adaptive, the model decides.")
    budget_tokens: Int32 | None = Field(None, ge=0, description="With enabled: thinking ends after this many tokens.")
    display: Text | None = Field(None, description="Refused: thinking is always returned in full.")


class JsonFormat(ClosedModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(ClosedModel):
    format: JsonFormat | None = None
    effort: Text | None = Field(None, description="Refused.")


class AnthropicConversation(RequestFields):
    """The fields of a request that determine its prompt."""

    messages: Turns
    system: MaybeEmptyText | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True), bounded_size] = Field([])
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="Default: the model decides.")
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: JsonObject = Field({}, description="Variables passed to the chat template.")

    @model_validator(mode="after")
    def _check(self) -> "AnthropicConversation":
        thinking = self.thinking or ThinkingConfig(type="adaptive")
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise wrong("thinking.budget_tokens", "must be given with the type enabled, and only then")
        if thinking.display is not None:
            raise wrong("thinking.display", "is not supported: thinking is always returned in full")
        if self.output_config.effort is not None:
            raise wrong("output_config.effort", "is not supported")
        return self


class CountTokensRequest(AnthropicConversation):
    pass


class MessagesRequest(AnthropicConversation, SamplingFields):
    max_tokens: int = Field(ge=1, le=MAX_INT32)
    stop_sequences: StopStrings = Field([])
    stream: bool = False


class TextAnswer(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingAnswer(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always empty: thinking is not signed."""


class ToolUseAnswer(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(BaseModel):
    """Token counts. The prompt is input_tokens, which were computed, and cache_read_input_tokens, which were cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    """The whole message. A stream sends it as the events of Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextAnswer | ThinkingAnswer | ToolUseAnswer, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage
    seed: int
    timings: Timings


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicProblem(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"]
    error: AnthropicProblem
    request_id: str
