"""The tools of a request of Anthropic's API -> functions of a chat request."""

from collections.abc import Mapping
from typing import Any

from server.anthropic.built_in_tools import function_of_type
from server.chat.translated import given
from server.core.errors import BadRequestError
from server.protocol.anthropic import AnthropicConversation
from server.protocol.anthropic_tools import AnthropicTool, AnthropicToolChoice, CustomTool, ToolByName


def functions_of(request: AnthropicConversation) -> Mapping[int, dict[str, Any]]:
    """Returns the functions that the model is offered, by the index of their tool."""
    functions = {index: _function(tool) for index, tool in enumerate(request.tools)}
    return {index: function for index, function in functions.items() if function is not None}


def left_out(request: AnthropicConversation) -> list[AnthropicTool]:
    """Returns the tools that the model is not told of: nobody could run them here."""
    return [tool for tool in request.tools if _function(tool) is None]


def tool_fields(request: AnthropicConversation) -> dict[str, Any]:
    """Returns the chat request's fields. Raises BadRequestError where a tool must be called that is left out."""
    functions, choice = functions_of(request), request.tool_choice
    _check_choice(choice, left_out(request), bool(functions))
    return given(
        tools=[{"type": "function", "function": function} for function in functions.values()],
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
    )


def label_of(tool: AnthropicTool) -> str:
    return tool.name if isinstance(tool, CustomTool) else tool.type


def _function(tool: AnthropicTool) -> dict[str, Any] | None:
    """Returns the function; None for a tool that cannot be called here."""
    meant = _described(tool) if "direct" in tool.allowed_callers else None
    if meant is None:
        return None
    parameters = {**meant["parameters"], **given(examples=tool.input_examples)}
    return {**meant, **given(name=tool.name, strict=tool.strict), "parameters": parameters}


def _described(tool: AnthropicTool) -> Mapping[str, Any] | None:
    if isinstance(tool, CustomTool):
        return {**given(description=tool.description), "parameters": tool.input_schema}
    return function_of_type(tool.type)


def _check_choice(choice: AnthropicToolChoice | None, absent: list[AnthropicTool], has_functions: bool) -> None:
    match choice:
        case ToolByName(name=name) if name in (tool.name for tool in absent):
            raise BadRequestError(f"tool_choice.name is {name!r}, a tool that cannot be run here.", "tool_choice")
        case _ if absent and not has_functions and choice is not None and choice.type == "any":
            label = label_of(absent[0])
            raise BadRequestError(f"tool_choice.type is 'any', but {label} cannot be run here.", "tool_choice")


def _choice(choice: AnthropicToolChoice | None) -> Any:
    if isinstance(choice, ToolByName):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice is None else {"auto": "auto", "any": "required", "none": "none"}[choice.type]
