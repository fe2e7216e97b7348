"""Message parts joined: to one delta of a stream, or to the whole message."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from server.tools.message_parts import Content, Part, Reasoning, ToolCall


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the delta of one step's parts. Without any, it is one of empty content."""
    match parts:
        case [Content(text)]:  # the usual one, once per step
            return {"content": text}
    texts = _texts(parts)
    if calls := _calls(parts):
        texts["tool_calls"] = [_call_delta(call) for call in calls]
    return texts or {"content": ""}


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the whole message. Its content is null only beside tool calls."""
    texts, calls = _texts(parts), [_whole_call(call) for call in _calls(parts)]
    message = {"role": "assistant", "content": None if calls else "", "refusal": None, **texts}
    return {**message, "tool_calls": calls} if calls else message


def _texts(parts: Sequence[Part]) -> dict[str, Any]:
    texts: dict[str, Any] = {}
    for name, kind in (("reasoning_content", Reasoning), ("content", Content)):
        if text := "".join(part.text for part in parts if isinstance(part, kind)):
            texts[name] = text
    return texts


def _calls(parts: Sequence[Part]) -> list[ToolCall]:
    """Returns one call per index, its pieces joined: clients take two entries of one index for two calls."""
    calls: dict[int, ToolCall] = {}
    for piece in parts:
        if isinstance(piece, ToolCall):
            before = calls.get(piece.index)
            calls[piece.index] = replace(before, arguments=before.arguments + piece.arguments) if before else piece
    return list(calls.values())


def _call_delta(call: ToolCall) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def _whole_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
