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
_PerhapsBounds = Field(max_length=MAX_PARTS, fail_fast=True)

OnlyText = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[_Texts, _Bounds, Tag("<blocks>")],
    text_or("<blocks>"),
]
PerhapsText = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[_Texts, _PerhapsBounds, Tag("<blocks>")],
    text_or("<blocks>"),
]
"""A list without blocks is nothing, as tools of MCP servers say it."""


class ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: PerhapsText = ""
    is_error: bool = Field(False, description='The result is told to the model with "Error: " before it.')


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ThinkingBlock(WireModel):
    """Templates may leave it out. Signatures mean nothing here."""

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
    content: OnlyText


class UserTurn(WireModel):
    role: Literal["user"]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[UserBlock], _Bounds, Tag("<blocks>")], text_or("<blocks>")
    ]


class AssistantTurn(WireModel):
    """An answer without anything has no blocks, and can be sent back as it is."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[AssistantBlock], _PerhapsBounds, Tag("<blocks>")],
        text_or("<blocks>"),
    ]


class _UnknownTurn(WireModel):
    """Never valid."""

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
