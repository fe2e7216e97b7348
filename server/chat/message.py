"""Parts added up: to one delta of a stream, or to the whole message."""

from collections.abc import Sequence
from typing import Any

from server.chat.parts import Content, Part, Reasoning, ToolCall


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """A token whose text is empty, or held back, still is a delta: of empty content."""
    texts = _texts(parts)
    calls = [_call_delta(part) for part in parts if isinstance(part, ToolCall)]
    if calls:
        texts["tool_calls"] = calls
    return texts or {"content": ""}


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Content is null only beside tool calls."""
    texts, calls = _texts(parts), _whole_calls(parts)
    message = {"role": "assistant", "content": None if calls else "", "refusal": None, **texts}
    return {**message, "tool_calls": calls} if calls else message


def _texts(parts: Sequence[Part]) -> dict[str, Any]:
    texts: dict[str, Any] = {}
    for name, kind in (("reasoning_content", Reasoning), ("content", Content)):
        if text := "".join(part.text for part in parts if isinstance(part, kind)):
            texts[name] = text
    return texts


def _call_delta(piece: ToolCall) -> dict[str, Any]:
    function = {"arguments": piece.arguments}
    if piece.id is None:
        return {"index": piece.index, "function": function}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": {"name": piece.name, **function}}


def _whole_calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for piece in parts:
        if not isinstance(piece, ToolCall):
            continue
        if piece.index in calls:
            calls[piece.index]["function"]["arguments"] += piece.arguments
        else:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls[piece.index] = {"id": piece.id, "type": "function", "function": function}
    return list(calls.values())
