"""POST /v1/messages and /v1/messages/count_tokens: request parameters and response models."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from server.protocol.answers import Timings
from server.protocol.anthropic_blocks import MaybeEmptyText, ToolResultBlock, ToolUseBlock, Turn, Turns
from server.protocol.anthropic_context import ContextManagement
from server.protocol.anthropic_tools import AnthropicToolChoice, AnthropicTools
from server.protocol.cache_steering import RETENTION_S, Cacheable, CacheControl
from server.protocol.generation import SamplingFields, wrong
from server.protocol.request import RequestFields
from server.protocol.typed_streams import TypedStreamFields
from server.protocol.wire import MAX_INT32, ClosedModel, Int32, JsonObject, StopStrings


class ThinkingConfig(ClosedModel):
    type: Literal["enabled", "disabled", "adaptive"] = Field(description="With adaptive, the model decides.")
    budget_tokens: Int32 | None = Field(None, ge=0, description="With enabled: thinking ends after this many tokens.")
    display: Literal["summarized", "omitted"] = Field(
        "summarized", description="With omitted the answer does not tell the thinking. It is never summarized."
    )
    block_binding: JsonObject | None = Field(None, description="No effect: thinking is not signed.")


class JsonFormat(ClosedModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(ClosedModel):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The template gets it as reasoning_effort, which knows nothing above high."
    )


class AnthropicConversation(RequestFields, Cacheable):
    """The fields of a request that determine its prompt."""

    messages: Turns
    system: MaybeEmptyText | None = None
    tools: AnthropicTools = Field([])
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="Default: the model decides.")
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement | None = None
    chat_template_kwargs: JsonObject = Field({}, description="Variables passed to the chat template.")

    @model_validator(mode="after")
    def _check(self) -> "AnthropicConversation":
        thinking = self.thinking or ThinkingConfig(type="adaptive")
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise wrong("thinking.budget_tokens", "must be given with the type enabled, and only then")
        return self

    @property
    def cache_controls(self) -> list[CacheControl]:
        """The marks of what is to be cached: the request's own, and those of blocks and tools."""
        return [each.cache_control for each in (self, *self._blocks()) if each.cache_control is not None]

    @property
    def retain_s(self) -> float:
        return max(super().retain_s, *(RETENTION_S[each.ttl] for each in self.cache_controls), 0.0)

    def _blocks(self) -> Iterator[Cacheable]:
        contents = (self.system, self.tools, *(turn.content for turn in self.messages))
        blocks = [block for each in contents if isinstance(each, list) for block in each]
        results = (each.content for each in blocks if isinstance(each, ToolResultBlock))
        inner = chain.from_iterable(each for each in results if isinstance(each, list))
        return (each for each in chain(blocks, inner) if isinstance(each, Cacheable))


class CountTokensRequest(AnthropicConversation):
    pass


class MessagesRequest(AnthropicConversation, SamplingFields, TypedStreamFields):
    max_tokens: int = Field(ge=1, le=MAX_INT32, description="A bound: an answer may also end with the context.")
    temperature: float | None = Field(None, ge=0, le=1)
    stop_sequences: StopStrings = Field([])

    @model_validator(mode="after")
    def _check_results(self) -> "MessagesRequest":
        if (place := _result_without_call(self.messages)) is not None:
            raise wrong(
                f"{place}.tool_use_id",
                "must be the id of a tool_use block in an earlier message; send that message, too",
            )
        return self


def _result_without_call(messages: Sequence[Turn]) -> str | None:
    """Returns the place of the first result of a call that no message before it has; None if there is none."""
    called: set[str] = set()
    for index, turn in enumerate(messages):
        for number, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            match block:
                case ToolUseBlock(id=call_id):
                    called.add(call_id)
                case ToolResultBlock(tool_use_id=call_id) if call_id not in called:
                    return f"messages.{index}.content.{number}"
    return None


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
    """Token counts. The first three are the prompt's: computed; computed and cached, if the request marks what is to be
    cached; found in the cache."""

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
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
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
