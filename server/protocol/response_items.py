"""The items of a response's `input`, by type. Errors name the place: `input.0.content.1`."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.protocol.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    FunctionCall,
    RefusalPart,
    bounded_parts,
    omitting_image,
    refusing_part,
)
from server.protocol.response_tool_items import (
    ClientToolCallItem,
    ClientToolOutputItem,
    CodeRunItem,
    CustomCallItem,
    FileSearchItem,
    LeftOutItem,
    McpCallItem,
)
from server.protocol.response_tools import Tools
from server.protocol.tags import field_of, text_or, type_of
from server.protocol.wire import Text, WireModel


class TextItemPart(WireModel):
    type: Literal["input_text", "output_text"]
    text: Text


class ReasoningPart(WireModel):
    type: Literal["reasoning_text", "text"]
    text: Text


class SummaryPart(WireModel):
    type: Literal["summary_text"]
    text: Text


class _UnsupportedPart(TextItemPart):
    _refuse = model_validator(mode="before")(refusing_part("input_text", "output_text"))


class _OmittedImage(TextItemPart):
    _omit = model_validator(mode="before")(omitting_image("input_text"))


_PART_TAGS = {"input_text": "<text>", "output_text": "<text>", "refusal": "<refusal>"}


def _part_tag(part: Any) -> str:
    return _PART_TAGS.get(str(type_of(part)), "<other>")


def _result_tag(part: Any) -> str:
    return "<image>" if type_of(part) == "input_image" else _part_tag(part)


ItemPart = Annotated[
    Annotated[TextItemPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[_UnsupportedPart], Tag("<other>")],
    Discriminator(_part_tag),
]
ItemContent = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[ItemPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    text_or("<parts>"),
]
ResultPart = Annotated[
    Annotated[TextItemPart, Tag("<text>")]
    | Annotated[SkipJsonSchema[_OmittedImage], Tag("<image>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[_UnsupportedPart], Tag("<other>")],
    Discriminator(_result_tag),
]
ResultContent = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[ResultPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    text_or("<parts>"),
]
"""A function's result, in which images are told of in text. It may be a list without parts: MCP servers return one for
a tool that has nothing to return."""


class MessageItem(WireModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(FunctionCall):
    type: Literal["function_call"]
    call_id: Text
    namespace: Text | None = None


class CallOutputItem(WireModel):
    """What a function or a custom tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: ResultContent


class ReasoningItem(WireModel):
    """The model's thinking before the items that follow; templates may leave it out. Without content the summary
    counts. What is encrypted is for others."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], Field(max_length=MAX_PARTS, fail_fast=True)] = Field([])
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS, fail_fast=True)] = Field([])

    @property
    def text(self) -> str:
        parts: list[ReasoningPart] | list[SummaryPart] = self.content or self.summary
        return "\n".join(part.text for part in parts)


_WHY_NOT = {
    "item_reference": "nothing is stored",
    "compaction": "what another server has compacted and encrypted cannot be read here",
}


class AdditionalToolsItem(WireModel):
    """Further tools, which are offered as those of the request are."""

    type: Literal["additional_tools", "tool_search_output"]
    tools: Tools = Field([])


class _UnsupportedItem(MessageItem):
    """A reference to a stored item, a conversation that others have encrypted, or the like. Never valid."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        shown = ascii(kind)[:40] if isinstance(kind, str) else "this"
        why = _WHY_NOT.get(str(kind), "items are messages, calls of tools with their outputs, and reasoning")
        raise PydanticCustomError("item", "{kind} is not supported: {why}", {"kind": shown, "why": why})


_CLASSES: tuple[type[WireModel], ...] = (
    *(MessageItem, FunctionCallItem, CallOutputItem, ReasoningItem, CustomCallItem, ClientToolCallItem),
    *(ClientToolOutputItem, McpCallItem, CodeRunItem, FileSearchItem, LeftOutItem),
    AdditionalToolsItem,
)
_TAGS = {kind: f"<{each.__name__}>" for each in _CLASSES for kind in get_args(each.model_fields["type"].annotation)}


def _item_tag(item: Any) -> str:
    kind = field_of(item, "type", "message")
    return _TAGS.get(kind, "<other>") if isinstance(kind, str) else "<other>"


InputItem = Annotated[
    Annotated[MessageItem, Tag("<MessageItem>")]
    | Annotated[FunctionCallItem, Tag("<FunctionCallItem>")]
    | Annotated[CallOutputItem, Tag("<CallOutputItem>")]
    | Annotated[ReasoningItem, Tag("<ReasoningItem>")]
    | Annotated[CustomCallItem, Tag("<CustomCallItem>")]
    | Annotated[ClientToolCallItem, Tag("<ClientToolCallItem>")]
    | Annotated[ClientToolOutputItem, Tag("<ClientToolOutputItem>")]
    | Annotated[McpCallItem, Tag("<McpCallItem>")]
    | Annotated[CodeRunItem, Tag("<CodeRunItem>")]
    | Annotated[FileSearchItem, Tag("<FileSearchItem>")]
    | Annotated[LeftOutItem, Tag("<LeftOutItem>")]
    | Annotated[AdditionalToolsItem, Tag("<AdditionalToolsItem>")]
    | Annotated[SkipJsonSchema[_UnsupportedItem], Tag("<other>")],
    Discriminator(_item_tag),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), bounded_parts]


Input = Annotated[Annotated[Text, Tag("<text>")] | Annotated[InputItems, Tag("<items>")], text_or("<items>")]
