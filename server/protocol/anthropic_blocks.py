"""The messages of Anthropic's API and the blocks they are made of. Errors name the place: `messages.0.content.1`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from server.protocol.messages import MAX_MESSAGES, MAX_PARTS, bounded_parts, refusing_part
from server.protocol.tags import by_type, field_of, text_or
from server.protocol.wire import Text, WireModel


class TextBlock(WireModel):
    type: Literal["text"]
    text: Text


class _UnsupportedBlock(TextBlock):
    _refuse = model_validator(mode="before")(refusing_part("text"))


_Text = Annotated[TextBlock, Tag("<text>")]
_Other = Annotated[SkipJsonSchema[_UnsupportedBlock], Tag("<other>")]
_Texts = list[Annotated[_Text | _Other, by_type("text")]]
_Bounds = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
_MaybeEmptyBounds = Field(max_length=MAX_PARTS, fail_fast=True)

TextContent = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[_Texts, _Bounds, Tag("<blocks>")],
    text_or("<blocks>"),
]
MaybeEmptyText = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[_Texts, _MaybeEmptyBounds, Tag("<blocks>")],
    text_or("<blocks>"),
]
"""Text that may be a list without blocks: MCP servers return one for a tool that has nothing to return."""


class ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: MaybeEmptyText = ""
    is_error: bool = Field(False, description='The model gets the result with "Error: " before it.')


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ThinkingBlock(WireModel):
    """Thinking of an earlier turn; chat templates may leave it out. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: Text


UserBlock = Annotated[
    _Text | Annotated[ToolResultBlock, Tag("<tool_result>")] | _Other,
    by_type("text", "tool_result"),
]
AssistantBlock = Annotated[
    _Text | Annotated[ToolUseBlock, Tag("<tool_use>")] | Annotated[ThinkingBlock, Tag("<thinking>")] | _Other,
    by_type("text", "tool_use", "thinking"),
]


class SystemTurn(WireModel):
    role: Literal["system"]
    content: TextContent


class UserTurn(WireModel):
    role: Literal["user"]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[UserBlock], _Bounds, Tag("<blocks>")], text_or("<blocks>")
    ]


class AssistantTurn(WireModel):
    """A message of the assistant. It may have no blocks, as an empty answer has: every answer can be sent back."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[AssistantBlock], _MaybeEmptyBounds, Tag("<blocks>")],
        text_or("<blocks>"),
    ]


class _UnknownTurn(WireModel):
    """A message without a known role. Never valid."""

    role: Literal["user", "assistant", "system"]
    content: Text


def _role(turn: Any) -> str:
    role = field_of(turn, "role")
    return f"<{role}>" if role in ("user", "assistant", "system") else "<unknown>"


Turn = Annotated[
    Annotated[UserTurn, Tag("<user>")]
    | Annotated[AssistantTurn, Tag("<assistant>")]
    | Annotated[SystemTurn, Tag("<system>")]
    | Annotated[SkipJsonSchema[_UnknownTurn], Tag("<unknown>")],
    Discriminator(_role),
]
Turns = Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), bounded_parts]
