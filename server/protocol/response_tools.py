"""The tools of a request of the responses API, and which of them may or must be called."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.protocol.tags import choice_tag, type_of
from server.protocol.tools import MAX_TOOLS, Function, FunctionName, Name
from server.protocol.wire import ClosedModel, Text, WireModel, bounded_size

BUILT_IN = frozenset(
    {
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("file_search", "code_interpreter", "image_generation", "mcp", "computer", "computer_use_preview"),
        *("local_shell", "shell", "apply_patch", "tool_search", "programmatic_tool_calling"),
    }
)
"""Types of OpenAI's own tools. There are none here, so they are left out."""


class _FunctionType(WireModel):
    type: Literal["function"]


class FunctionTool(Function, _FunctionType):
    pass


class TextInput(ClosedModel):
    type: Literal["text"]


class GrammarInput(ClosedModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Text


InputFormat = Annotated[
    Annotated[TextInput, Tag("<text>")] | Annotated[GrammarInput, Tag("<grammar>")],
    Discriminator(lambda value: "<grammar>" if type_of(value) == "grammar" else "<text>"),
]


class CustomTool(WireModel):
    """A tool that takes text instead of arguments."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: InputFormat = TextInput(type="text")


class BuiltInTool(WireModel):
    """One of OpenAI's own tools, which is left out. Its other fields do not matter."""

    model_config = ConfigDict(extra="allow")

    type: Text


class _UnknownTool(BuiltInTool):
    """A tool of an unknown type. Never valid."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        kind = type_of(data)
        shown = ascii(kind)[:40] if isinstance(kind, str) else "this"
        raise PydanticCustomError("kind", "{kind} is not supported: tools are functions", {"kind": shown})


def _by_kind(*own: str) -> Discriminator:
    """Returns a discriminator by the type: one tag for each of `own`, one for built-in tools, one for unknown ones."""

    def tag(value: Any) -> str:
        kind = type_of(value)
        if not isinstance(kind, str):
            return "<unknown>"
        return f"<{kind}>" if kind in own else "<built-in>" if kind in BUILT_IN else "<unknown>"

    return Discriminator(tag)


_NamedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[BuiltInTool, Tag("<built-in>")]
    | Annotated[SkipJsonSchema[_UnknownTool], Tag("<unknown>")],
    _by_kind("function", "custom"),
]


class NamespaceTool(WireModel):
    """Tools under a common name, which calls of them have, too."""

    type: Literal["namespace"]
    name: Name
    description: Text | None = None
    tools: Annotated[list[_NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[BuiltInTool, Tag("<built-in>")]
    | Annotated[SkipJsonSchema[_UnknownTool], Tag("<unknown>")],
    _by_kind("function", "custom", "namespace"),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), bounded_size]


class NamedTool(FunctionName):
    """A choice of a function or of a custom tool."""

    type: Literal["function", "custom"]
    namespace: Name | None = None


OneChoice = Annotated[
    Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedTool, Tag("<custom>")]
    | Annotated[BuiltInTool, Tag("<built-in>")]
    | Annotated[SkipJsonSchema[_UnknownTool], Tag("<unknown>")],
    _by_kind("function", "custom"),
]


class AllowedTools(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[OneChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[OneChoice, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(choice_tag),
]


def without_built_in(tools: Iterable[Tool]) -> list[FunctionTool | CustomTool | NamespaceTool]:
    """Returns the tools without those that are left out, also from namespaces."""
    return [_own_part(tool) for tool in tools if not isinstance(tool, BuiltInTool)]


def _own_part(tool: FunctionTool | CustomTool | NamespaceTool) -> FunctionTool | CustomTool | NamespaceTool:
    if not isinstance(tool, NamespaceTool):
        return tool
    return tool.model_copy(update={"tools": [each for each in tool.tools if not isinstance(each, BuiltInTool)]})
