"""A request of the responses API -> the chat request that asks for the same."""

from typing import Any

from server.chat.translated import chat_request, given
from server.core.errors import BadRequestError
from server.generation.error_renaming import ErrorRenaming
from server.protocol.chat import ChatRequest
from server.protocol.response_tools import AllowedTools, BuiltInTool, NamedTool
from server.protocol.responses import ResponsesRequest, SchemaFormat, TextFormat
from server.protocol.tools import Tool
from server.responses.function_tools import OfferedTools
from server.responses.turns import messages_of


def renaming(request: ResponsesRequest, offered: OfferedTools) -> ErrorRenaming:
    """Returns what gives errors of the chat request the names of this API, and the places that tools have in it."""
    tools = offered.tools
    allowed = [f"tool_choice.tools.{index}" for index, _ in _allowed_tools(request)]
    return ErrorRenaming(
        (r"tool_choice\.allowed_tools\.tools\.(\d+)\.function", lambda found: allowed[int(found[1])]),
        (r"tool_choice\.function", "tool_choice"),
        (r"tools\.(\d+)\.function\.parameters", lambda found: tools[int(found[1])].place_of_schema),
        (r"tools\.(\d+)\.function", lambda found: tools[int(found[1])].place),
        ("max_completion_tokens|max_tokens", "max_output_tokens"),
        (r"response_format\.json_schema|response_format", "text.format"),
        (r"messages\.\d+\.tool_calls[.\w]*", "input: function calls in a row"),
        ("reasoning_effort", "reasoning.effort"),
        ("messages", "input"),
    )


def to_chat(request: ResponsesRequest, offered: OfferedTools) -> ChatRequest:
    """Returns the chat request. Raises ValidationError, with the names of the chat API, and BadRequestError if the
    input says nothing or a built-in tool must be called."""
    fields = given(
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        stop=request.stop,
        stream=request.stream,
        logprobs=True if request.num_logprobs is not None else None,
        top_logprobs=request.num_logprobs,
        tools=[Tool(type="function", function=tool.function) for tool in offered.tools],
        tool_choice=_choice(request, offered),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text.format),
        thinking_token_budget=request.thinking_token_budget,
        reasoning_effort=request.reasoning.effort,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return chat_request(request, fields)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    instructions = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        return [*instructions, {"role": "user", "content": request.input}]
    messages = [*instructions, *messages_of(request.input)]
    if not messages:
        raise BadRequestError("input: none of the items has text for the model.", "input")
    return messages


def _choice(request: ResponsesRequest, offered: OfferedTools) -> Any:
    """Returns the chat API's tool_choice. Auto is the default, and may be asked for without tools."""
    match request.tool_choice:
        case "auto":
            return None
        case "required" if offered.left_out and not offered.tools:
            raise _built_in(offered.left_out[0])
        case NamedTool() as named:
            return _named(named, offered)
        case BuiltInTool() as tool:
            raise _built_in(tool.type)
        case AllowedTools() as allowed if tools := _allowed_tools(request):
            names = [_named(tool, offered) for _, tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": allowed.mode, "tools": names}}
        case AllowedTools(mode="required") as allowed:
            raise _built_in(allowed.tools[0].type)
        case AllowedTools():
            return "none"
        case mode:
            return mode


def _allowed_tools(request: ResponsesRequest) -> list[tuple[int, NamedTool]]:
    """Returns the tools of a list of allowed ones, with their places in it. Built-in ones are never called."""
    tools = request.tool_choice.tools if isinstance(request.tool_choice, AllowedTools) else []
    return [(index, tool) for index, tool in enumerate(tools) if isinstance(tool, NamedTool)]


def _named(choice: NamedTool, offered: OfferedTools) -> dict[str, Any]:
    return {"type": "function", "function": {"name": offered.chosen(choice.name, choice.namespace)}}


def _built_in(kind: str) -> BadRequestError:
    return BadRequestError(
        f"tool_choice: {ascii(kind)[:40]} is a built-in tool, and there is none here.", "tool_choice"
    )


def _format(text_format: TextFormat) -> dict[str, Any] | None:
    if isinstance(text_format, SchemaFormat):
        schema = text_format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": "json_schema", "json_schema": schema}
    return None if text_format.type == "text" else {"type": text_format.type}
