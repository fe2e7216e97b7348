"""The items of a response's input -> the messages of a chat."""

from collections.abc import Iterable
from typing import Any

from server.protocol.response_items import (
    CallOutputItem,
    FunctionCallItem,
    InputItem,
    ItemContent,
    MessageItem,
    ReasoningItem,
)
from server.protocol.response_tool_items import (
    ClientToolCallItem,
    ClientToolOutputItem,
    CodeRunItem,
    CustomCallItem,
    FileSearchItem,
    McpCallItem,
)
from server.responses.function_tools import joined_name

Message = dict[str, Any]


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """Returns the messages. Thinking, text and calls that the model wrote in a row are one message. Items without text
    for the model are left out."""
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem() if item.role != "assistant":
                messages.append({"role": item.role, "content": _content(item.content)})
            case MessageItem():
                _add_text(messages, item.content)
            case ReasoningItem() if item.text:
                messages.append({"role": "assistant", "content": "", "reasoning_content": item.text})
            case FunctionCallItem() | CustomCallItem():
                _add_call(messages, item.call_id, joined_name(item.namespace, item.name), item.arguments)
            case ClientToolCallItem():
                _add_call(messages, item.call_id, item.name, item.arguments)
            case CallOutputItem():
                messages.append(_result(item.call_id, _content(item.output)))
            case ClientToolOutputItem():
                messages.append(_result(item.call_id, item.text))
            case McpCallItem() | CodeRunItem() | FileSearchItem():
                _add_call(messages, item.id, item.name, item.arguments)
                messages.append(_result(item.id, item.text))
    return messages


def _add_text(messages: list[Message], content: ItemContent) -> None:
    """Adds text of the model: to its message, unless that has text or calls already."""
    last = _last_of_model(messages)
    if last is None or last["content"] != "" or "tool_calls" in last:
        last = {"role": "assistant"}
        messages.append(last)
    last["content"] = _content(content)


def _add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    last = _last_of_model(messages)
    if last is None:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    last.setdefault("tool_calls", []).append(call)


def _last_of_model(messages: list[Message]) -> Message | None:
    """Returns the last message if the model wrote it."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _result(call_id: str, content: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _content(content: ItemContent) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [part.model_dump() if part.type == "refusal" else {"type": "text", "text": part.text} for part in content]
