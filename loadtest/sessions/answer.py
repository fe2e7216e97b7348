"""What a model answered in a turn, as the next turn's prompt needs it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool; its arguments are JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether the call can be sent back: it has a name, and its arguments are an object, not cut off."""
        try:
            return bool(self.id and self.name) and isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False


@dataclass(frozen=True)
class Answer:
    """Text and calls of an answer. Thinking is left out, as agents do not send it back."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ChatAnswer:
    """Puts an answer together from the deltas of a chat."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        if text := delta.get("content"):
            self._pieces.append(text)
        for part in delta.get("tool_calls") or ():
            call = self._calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] = call["id"] or part.get("id") or ""
            function = part.get("function") or {}
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def whole(self) -> Answer:
        return Answer("".join(self._pieces), tuple(ToolCall(**self._calls[index]) for index in sorted(self._calls)))


def answer_of_items(items: Iterable[Mapping[str, Any]]) -> Answer:
    """Returns the answer in the output of a response."""
    pieces, calls = [], []
    for item in items:
        if item.get("type") == "message":
            pieces += [part["text"] for part in item["content"] if part.get("type") == "output_text"]
        elif item.get("type") == "function_call":
            calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
    return Answer("".join(pieces), tuple(calls))
