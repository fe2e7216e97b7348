"""The tools of a request, and which of them may or must be called."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.protocol.generation import wrong
from server.protocol.tags import choice_tag
from server.protocol.wire import Text, WireModel, bounded_size, check_serializable

MAX_TOOLS = 4096
"""Maximum number of tools. Real ones reach `MAX_TOOLS_CHARS` first: these would have 256 characters each."""
MAX_TOOLS_CHARS = 2**20
"""Maximum length of all tools together, as JSON."""

MAX_NAME_LENGTH = 128  # Anthropic's; OpenAI's have 64

_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_LENGTH}}}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "Names have 1 to 128 letters, digits, underscores and dashes")
    return name


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuses a schema that is not of an object: functions take objects."""
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("schema", 'Input should be the JSON schema of an object, with "type": "object"')
    return check_serializable(schema)


def _check_kind(kind: Any) -> Any:
    if kind != "function" and isinstance(kind, str):
        raise PydanticCustomError("kind", "{kind} is not supported: tools are functions", {"kind": ascii(kind)[:40]})
    return kind


Name = Annotated[str, AfterValidator(_check_name)]
Kind = Annotated[Literal["function"], BeforeValidator(_check_kind)]
Schema = Annotated[dict[str, Any], AfterValidator(_check_schema)]


class Function(WireModel):
    name: Name
    description: Text | None = None
    parameters: Schema | None = Field(None, description="A JSON schema; without one the function takes no arguments.")
    strict: bool = Field(False, description="Calls satisfy the schema even if they are not required.")

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}}
        return {"type": "object", **self.parameters}


INPUT = "input"
"""The one argument of a function of text."""


class TextFunction(Function):
    """A function of one text, which follows a grammar in Lark's notation. Requests of chats have none."""

    grammar: Text = Field(exclude=True)  # the model is told in the description


class Tool(WireModel):
    type: Kind
    function: Function


class FunctionName(WireModel):
    name: Name


class NamedTool(WireModel):
    type: Kind
    function: FunctionName


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    Discriminator(choice_tag),
]


class ToolParams(WireModel):
    """The fields of a request that concern tools."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), bounded_size] = Field([])
    tool_choice: ToolChoice | None = Field(
        None, description="Default: auto. Required calls are guaranteed by a grammar."
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call.")

    def check_tools(self) -> None:
        names = set[str]()
        for index, tool in enumerate(self.tools):
            if tool.function.name in names:
                raise wrong(f"tools.{index}.function.name", f"must not be {tool.function.name!r} again")
            names.add(tool.function.name)
        if len(json.dumps([tool.model_dump() for tool in self.tools])) > MAX_TOOLS_CHARS:
            raise wrong("tools", f"must not have more than {MAX_TOOLS_CHARS} characters together")
        if self.must_call and not names:
            raise wrong("tool_choice", "is only allowed with tools")
        for place, name in self._chosen_names():
            if name not in names:
                raise wrong(place, f"is {name!r}, which is none of tools")

    def _chosen_names(self) -> list[tuple[str, str]]:
        match self.tool_choice:
            case NamedTool(function=function):
                return [("tool_choice.function.name", function.name)]
            case AllowedToolsChoice(allowed_tools=allowed):
                return [
                    (f"tool_choice.allowed_tools.tools.{index}.function.name", tool.function.name)
                    for index, tool in enumerate(allowed.tools)
                ]
            case _:
                return []

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template gets; None where none may be called, for a model then calls none."""
        return None if self.tool_choice == "none" or not self.tools else [_template_tool(tool) for tool in self.tools]

    @property
    def callable_functions(self) -> Mapping[int, Function]:
        """The functions that may be called, by their index in `tools`."""
        chosen = {name for _, name in self._chosen_names()}
        if self.tool_choice == "none":
            return {}
        return {
            index: tool.function for index, tool in enumerate(self.tools) if not chosen or tool.function.name in chosen
        }

    @property
    def must_call(self) -> bool:
        match self.tool_choice:
            case AllowedToolsChoice(allowed_tools=allowed):
                return allowed.mode == "required"
            case NamedTool() | "required":
                return True
            case _:
                return False

    @property
    def may_call_once(self) -> bool:
        """Whether at most one call is allowed. A function chosen by its name is called once, as OpenAI's models do."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool)


def _template_tool(tool: Tool) -> dict[str, Any]:
    """Returns the tool in the form that chat templates expect, always with parameters."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    return {"type": "function", "function": {**function, "parameters": tool.function.schema_of_arguments}}
