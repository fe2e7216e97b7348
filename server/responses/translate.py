"""A request of the responses API -> the chat request that asks for the same."""

from collections.abc import Iterable
from typing import Any

from server.chat.translated import chat_request, given
from server.generation.error_renaming import ErrorRenaming
from server.protocol.chat import ChatRequest
from server.protocol.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    ItemContent,
    MessageItem,
    ReasoningItem,
)
from server.protocol.responses import (
    AllowedFunctions,
    FunctionChoice,
    FunctionTool,
    NamedFunction,
    ResponsesRequest,
    SchemaFormat,
    TextFormat,
)

RENAMING = ErrorRenaming(
    (r"tool_choice\.allowed_tools\.tools\.(\d+)\.function", r"tool_choice.tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    ("max_completion_tokens|max_tokens", "max_output_tokens"),
    (r"response_format\.json_schema|response_format", "text.format"),
    (r"messages\.\d+\.tool_calls[.\w]*", "input: function calls in a row"),
    ("messages", "input"),
)


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """Returns the chat request. Raises ValidationError, with the names of the chat API."""
    messages = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    fields = given(
        messages=[*messages, *_messages(request)],
        max_completion_tokens=request.max_output_tokens,
        stop=request.stop,
        stream=request.stream,
        logprobs=True if request.num_logprobs is not None else None,
        top_logprobs=request.num_logprobs,
        tools=[_tool(tool) for tool in request.tools],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls if request.tools else None,
        response_format=_format(request.text.format),
        thinking_token_budget=request.thinking_token_budget,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return chat_request(request, fields)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    return _turns(request.input)


def _turns(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Returns the messages. Thinking, text and calls that the model wrote in a row are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        match item:
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
            case MessageItem() if item.role != "assistant":
                messages.append({"role": item.role, "content": _content(item.content)})
            case MessageItem():
                if not last or last["content"] != "" or "tool_calls" in last:
                    messages.append({"role": "assistant"})
                messages[-1]["content"] = _content(item.content)
            case ReasoningItem():
                messages.append({"role": "assistant", "content": "", "reasoning_content": item.text})
            case FunctionCallItem():
                if not last:
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(_call(item))
    return messages


def _content(content: ItemContent) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [part.model_dump() if part.type == "refusal" else {"type": "text", "text": part.text} for part in content]


def _call(item: FunctionCallItem) -> dict[str, Any]:
    return {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments},
    }


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(choice: FunctionChoice) -> Any:
    """Returns the chat API's tool_choice. Auto is the default, and may be asked for without tools."""
    match choice:
        case "auto":
            return None
        case NamedFunction():
            return _named(choice)
        case AllowedFunctions():
            tools = [_named(tool) for tool in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
        case _:
            return choice


def _named(choice: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _format(text_format: TextFormat) -> dict[str, Any] | None:
    if isinstance(text_format, SchemaFormat):
        schema = text_format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": "json_schema", "json_schema": schema}
    return None if text_format.type == "text" else {"type": text_format.type}
