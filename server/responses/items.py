"""The items of a response's output: each as events while it is written, and whole."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.chat.blocks import Event
from server.tools.message_parts import Content, Part, Reasoning, ToolCall


class Scores:
    """Log-probabilities of tokens on their way to the text they are part of."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []

    def add(self, entries: Iterable[dict[str, Any]]) -> None:
        self._waiting += entries

    def take(self) -> list[dict[str, Any]]:
        taken, self._waiting = self._waiting, []
        return taken

    def take_beginning_with(self, text: str) -> list[dict[str, Any]]:
        """Without those before the text's own tokens: marks, as that behind the thinking, add no text."""
        taken, data = self.take(), text.encode()
        written, offset = b"".join(bytes(each["bytes"]) for each in taken), 0
        for start, each in enumerate(taken):
            if written.startswith(data, offset):
                return taken[start:]
            offset += len(each["bytes"])
        return taken[-1:]  # a token that is mark and text in one


@dataclass(slots=True)
class _Place:
    """Which item it is, and how far it is written."""

    index: int
    item_id: str
    status: str = "in_progress"

    def event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.item_id, "output_index": self.index, **fields}

    def added(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def done(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.done", "output_index": self.index, "item": item}

    def end(self, is_complete: bool) -> None:
        self.status = "completed" if is_complete else "incomplete"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What tells messages from thinking."""

    part_type: str
    item: Mapping[str, Any]
    part: Mapping[str, Any] = field(default_factory=dict)
    is_scored: bool = False


_MESSAGE = _Kind("output_text", {"type": "message", "role": "assistant"}, {"annotations": []}, is_scored=True)
_REASONING = _Kind("reasoning_text", {"type": "reasoning", "summary": []})


class TextItem:
    """A message, or the thinking before it: an item with one part of text."""

    def __init__(self, kind: _Kind, place: _Place, scores: Scores) -> None:
        self._kind = kind
        self._place = place
        self._scores = scores
        self._text = ""
        self._told: list[dict[str, Any]] = []

    def start(self) -> list[Event]:
        added = self._place.added(self.whole() | {"content": []})
        return [added, self._place.event("content_part.added", content_index=0, part=self._part())]

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, Content | Reasoning)
        scores = self._scores.take() if self._text else self._scores.take_beginning_with(part.text)
        self._text += part.text
        self._told += scores
        return [self._event("delta", delta=part.text, **self._scored(scores))]

    def end(self, is_complete: bool) -> list[Event]:
        self._place.end(is_complete)
        return [
            self._event("done", text=self._text, **self._all_scores()),
            self._place.event("content_part.done", content_index=0, part=self._part()),
            self._place.done(self.whole()),
        ]

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._place.item_id,
            **self._kind.item,
            "status": self._place.status,
            "content": [self._part()],
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": self._kind.part_type,
            "text": self._text,
            **self._kind.part,
            **self._all_scores(),
        }

    def _event(self, name: str, **fields: Any) -> Event:
        return self._place.event(f"{self._kind.part_type}.{name}", content_index=0, **fields)

    def _all_scores(self) -> dict[str, Any]:
        """An iterator is told a slice at a time."""
        return self._scored(iter(self._told[:]))

    def _scored(self, scores: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": scores} if self._kind.is_scored else {}


class CallItem:
    """A call of a function."""

    def __init__(self, call: ToolCall, place: _Place, scores: Scores) -> None:
        self._call = call
        self._place = place
        self._scores = scores
        self._arguments = ""

    def start(self) -> list[Event]:
        return [self._place.added(self.whole())]

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, ToolCall)
        self._scores.take()
        if not part.arguments:
            return []
        self._arguments += part.arguments
        return [self._place.event("function_call_arguments.delta", delta=part.arguments)]

    def end(self, is_complete: bool) -> list[Event]:
        self._place.end(is_complete)
        done = self._place.event(
            "function_call_arguments.done", name=self._call.name, arguments=self._arguments
        )  # fmt: skip
        return [done, self._place.done(self.whole())]

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._place.item_id,
            "type": "function_call",
            "status": self._place.status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": self._arguments,
        }


Item = TextItem | CallItem


def item_maker(stem: str, scores: Scores) -> Callable[[int, Part], Item]:
    """Items of one response; `stem` makes their ids its own."""

    def make(index: int, part: Part) -> Item:
        match part:
            case Content():
                return TextItem(_MESSAGE, _Place(index, f"msg_{stem}_{index}"), scores)
            case Reasoning():
                return TextItem(_REASONING, _Place(index, f"rs_{stem}_{index}"), scores)
            case ToolCall():
                return CallItem(part, _Place(index, f"fc_{stem}_{index}"), scores)

    return make
