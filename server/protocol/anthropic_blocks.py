"""The messages of Anthropic's API and the blocks they are made of. Errors name the place: `messages.0.content.1`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from server.protocol.cache_steering import Cacheable
from server.protocol.messages import MAX_MESSAGES, MAX_PARTS, bounded_parts, omitting_image, refusing_part
from server.protocol.tags import by_type, field_of, text_or, type_of
from server.protocol.wire import ClosedModel, Text, WireModel, bounded_size


class TextBlock(Cacheable):
    type: Literal["text"]
    text: Text


class _UnsupportedBlock(TextBlock):
    _refuse = model_validator(mode="before")(refusing_part("text"))


class _OmittedImage(TextBlock):
    _omit = model_validator(mode="before")(omitting_image("text"))


_Text = Annotated[TextBlock, Tag("<text>")]
_Image = Annotated[SkipJsonSchema[_OmittedImage], Tag("<image>")]
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
"""Text that may be a list without blocks, as some clients send it."""


class TextSource(WireModel):
    type: Literal["text"]
    data: Text


class BlocksSource(WireModel):
    type: Literal["content"]
    content: TextContent


class _UnsupportedSource(TextSource):
    _refuse = model_validator(mode="before")(refusing_part("text", "content"))


class Citations(ClosedModel):
    enabled: Literal[False] = Field(False, description="Answers cite nothing.")


class DocumentBlock(Cacheable):
    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("<text>")]
        | Annotated[BlocksSource, Tag("<content>")]
        | Annotated[SkipJsonSchema[_UnsupportedSource], Tag("<other>")],
        by_type("text", "content"),
    ]
    title: Text | None = None
    context: Text | None = None
    citations: Citations | None = None


class SearchResultBlock(Cacheable):
    type: Literal["search_result"]
    source: Text
    title: Text
    content: Annotated[_Texts, _MaybeEmptyBounds]
    citations: Citations | None = None


class ToolReferenceBlock(Cacheable):
    """A tool that a search of tools found."""

    type: Literal["tool_reference"]
    tool_name: Text


_Read = (
    _Text
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
)
ReadBlock = TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
"""Blocks that the model reads as text."""
_READ = ("text", "document", "search_result", "tool_reference")


class ToolResultBlock(Cacheable):
    """What a tool returned. The model is told of images in text."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[
            list[Annotated[_Read | _Image | _Other, by_type(*_READ, "image")]], _MaybeEmptyBounds, Tag("<blocks>")
        ],
        text_or("<blocks>"),
    ] = ""
    is_error: bool = Field(False, description='The model gets the result with "Error: " before it.')


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ThinkingBlock(WireModel):
    """Thinking of an earlier turn; chat templates may leave it out. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: Text


class SilentBlock(Cacheable):
    """A block that says nothing which a model could read: it is left out."""

    type: Literal["redacted_thinking", "server_tool_use", "mcp_tool_use"]


class EarlierResultBlock(Cacheable):
    """What a built-in tool returned in an earlier turn, elsewhere: the model reads what is text in it."""

    type: str = Field(pattern="_tool_result$", max_length=64)
    content: Annotated[Any, bounded_size] = None


UserBlock = Annotated[
    _Read | Annotated[ToolResultBlock, Tag("<tool_result>")] | _Other,
    by_type(*_READ, "tool_result"),
]
AssistantBlock = Annotated[
    _Text
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[SilentBlock, Tag("<silent>")]
    | Annotated[EarlierResultBlock, Tag("<result>")]
    | _Other,
    Discriminator(lambda block: _assistant_tag(type_of(block))),
]


def _assistant_tag(kind: Any) -> str:
    if kind in ("redacted_thinking", "server_tool_use", "mcp_tool_use"):
        return "<silent>"
    if isinstance(kind, str) and kind.endswith("_tool_result"):
        return "<result>"
    return f"<{kind}>" if kind in ("text", "tool_use", "thinking") else "<other>"


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
