"""The tools of Anthropic's API, and which of them may or must be called."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.protocol.cache_steering import Cacheable
from server.protocol.tags import type_of
from server.protocol.tools import MAX_TOOLS, Name, Schema
from server.protocol.wire import ClosedModel, Text, bounded_size

_BUILT_IN = re.compile(r"[a-z0-9_]{1,64}_[0-9]{8}|mcp_toolset")
"""Types of the tools that Anthropic defines: all but one end with the date of their version."""


def _check_kind(kind: Any) -> Any:
    if kind != "custom" and isinstance(kind, str):
        raise PydanticCustomError("kind", "{kind} is not supported: tools are your own", {"kind": ascii(kind)[:40]})
    return kind


class _Tool(Cacheable):
    strict: bool = Field(False, description="Calls satisfy the schema even if they are not required.")
    input_examples: list[dict[str, Any]] = Field([], description="The model gets them as the schema's examples.")
    allowed_callers: list[Text] = Field(["direct"], description="A tool that only code may call is left out.")


class CustomTool(_Tool):
    type: Annotated[Literal["custom"], BeforeValidator(_check_kind)] = "custom"
    name: Name
    description: Text | None = None
    input_schema: Schema


class BuiltInTool(_Tool):
    """A tool that its type alone describes. Clients run some of them; what Anthropic's servers run is left out."""

    type: str = Field(pattern=f"^({_BUILT_IN.pattern})$")
    name: Name | None = Field(None, description="A set of tools has none.")


AnthropicTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[BuiltInTool, Tag("<built-in>")],
    Discriminator(lambda tool: "<built-in>" if _is_built_in(type_of(tool)) else "<custom>"),
]
AnthropicTools = Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True), bounded_size]


def _is_built_in(kind: Any) -> bool:
    return isinstance(kind, str) and _BUILT_IN.fullmatch(kind) is not None


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
