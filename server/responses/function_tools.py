"""The tools of a request as functions, which is all that models call: custom tools and those of namespaces, too."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from server.core.errors import BadRequestError
from server.protocol.response_items import AdditionalToolsItem
from server.protocol.response_tools import BuiltInTool, CustomTool, FunctionTool, GrammarInput, NamespaceTool, Tool
from server.protocol.responses import ResponsesRequest
from server.protocol.tools import INPUT, MAX_NAME_LENGTH, Function, TextFunction

_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call, and the tool that the client knows it as."""

    function: Function
    place: str
    """The tool's path in the request, such as `tools.2.tools.0`."""
    name: str
    namespace: str | None
    takes_text: bool
    """Whether it is a custom tool."""

    @property
    def place_of_schema(self) -> str:
        return f"{self.place}.{'format.definition' if self.takes_text else 'parameters'}"


@dataclass(frozen=True, slots=True)
class OfferedTools:
    tools: tuple[OfferedTool, ...]
    left_out: tuple[str, ...]
    """The types of built-in tools, in their order."""

    def called(self, name: str) -> OfferedTool:
        """Returns the tool that the model calls by this name."""
        return next(tool for tool in self.tools if tool.function.name == name)

    def chosen(self, name: str, namespace: str | None) -> str:
        """Returns the model's name of a tool. Where it is the only one of its name, it may be named without its
        namespace."""
        alike = [tool.namespace for tool in self.tools if tool.name == name]
        is_clear = namespace is None and None not in alike and len(alike) == 1
        return joined_name(alike[0] if is_clear else namespace, name)


def joined_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def offered_tools(request: ResponsesRequest) -> OfferedTools:
    """Returns the tools that are not built-in, those of the input's items, too. Raises BadRequestError if a name is too
    long in its namespace."""
    entries = list(_entries("tools", request.tools))
    tools = [_offered(tool, place, space) for place, tool, space in entries if not isinstance(tool, BuiltInTool)]
    known = {tool.function.name: tool.function for tool in tools}
    for index, item in enumerate(() if isinstance(request.input, str) else request.input):
        if isinstance(item, AdditionalToolsItem):
            more = list(_entries(f"input.{index}.tools", item.tools))
            added = [_offered(tool, place, space) for place, tool, space in more if not isinstance(tool, BuiltInTool)]
            tools += [tool for tool in added if known.get(tool.function.name) != tool.function]  # once is enough
            known |= {tool.function.name: tool.function for tool in added}
            entries += more
    return OfferedTools(tuple(tools), tuple(tool.type for _, tool, _ in entries if isinstance(tool, BuiltInTool)))


def _entries(
    path: str, tools: Iterable[Tool]
) -> Iterator[tuple[str, FunctionTool | CustomTool | BuiltInTool, NamespaceTool | None]]:
    """Yields each tool with its path before it and its namespace behind it."""
    for index, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            yield from ((f"{path}.{index}.tools.{inner}", each, tool) for inner, each in enumerate(tool.tools))
        else:
            yield f"{path}.{index}", tool, None


def _offered(tool: FunctionTool | CustomTool, place: str, space: NamespaceTool | None) -> OfferedTool:
    namespace = None if space is None else space.name
    name = joined_name(namespace, tool.name)
    if len(name) > MAX_NAME_LENGTH:
        message = f"{place}.name: with its namespace it must not have more than {MAX_NAME_LENGTH} characters."
        raise BadRequestError(message, f"{place}.name")
    fields = {"name": name, "description": _description(tool, space)}
    return OfferedTool(_function(tool, fields), place, tool.name, namespace, isinstance(tool, CustomTool))


def _description(tool: FunctionTool | CustomTool, space: NamespaceTool | None) -> str | None:
    """Returns what the model is told of the tool. The first tool of a namespace tells of that, too."""
    about = [tool.description]
    if space is not None and space.description and tool is space.tools[0]:
        about.append(f"All functions whose names begin with {joined_name(space.name, '')}: {space.description}")
    if isinstance(tool, CustomTool) and isinstance(tool.format, GrammarInput) and tool.format.syntax == "lark":
        about.append(f"The {INPUT} follows this grammar, in Lark's notation:\n{tool.format.definition}")
    return "\n\n".join(filter(None, about)) or None


def _function(tool: FunctionTool | CustomTool, fields: dict[str, Any]) -> Function:
    """Returns the function of the tool. That of a custom tool has one argument; a grammar of it is kept."""
    if isinstance(tool, FunctionTool):
        return Function(parameters=tool.parameters, strict=tool.strict, **fields)
    schema: dict[str, Any] = {"type": "string"}
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    match tool.format:
        case GrammarInput(syntax="lark", definition=grammar):
            return TextFunction(parameters=parameters, strict=True, grammar=grammar, **fields)
        case GrammarInput(definition=pattern):
            schema["pattern"] = f"^(?:{pattern})$"
            return Function(parameters=parameters, strict=True, **fields)
        case _:
            return Function(parameters=parameters, **fields)
