"""The items of a response's output: each as events while it is written, and whole."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.chat.blocks import Event
from server.responses.call_items import CallItem
from server.responses.function_tools import OfferedTools
from server.responses.item_state import ItemState, PendingLogprobs
from server.tools.message_parts import Content, Part, Reasoning, ToolCall


@dataclass(frozen=True, slots=True)
class _Kind:
    """The fields in which messages and thinking differ."""

    part_type: str
    item: Mapping[str, Any]
    part: Mapping[str, Any] = field(default_factory=dict)
    has_logprobs: bool = False


_MESSAGE = _Kind("output_text", {"type": "message", "role": "assistant"}, {"annotations": []}, has_logprobs=True)
_REASONING = _Kind("reasoning_text", {"type": "reasoning", "summary": []})


class TextItem:
    """A message, or the thinking before it: an item with one part of text."""

    def __init__(self, kind: _Kind, state: ItemState, pending: PendingLogprobs) -> None:
        self._kind = kind
        self._state = state
        self._pending = pending
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def start(self) -> list[Event]:
        added = self._state.added(self.whole() | {"content": []})
        return [added, self._state.event("content_part.added", content_index=0, part=self._part())]

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, Content | Reasoning)
        logprobs = self._pending.take() if self._text else self._pending.take_beginning_with(part.text)
        self._text += part.text
        self._logprobs += logprobs
        return [self._event("delta", delta=part.text, **self._logprobs_field(logprobs))]

    def end(self, is_complete: bool) -> list[Event]:
        self._state.end(is_complete)
        return [
            self._event("done", text=self._text, **self._all_logprobs()),
            self._state.event("content_part.done", content_index=0, part=self._part()),
            self._state.done(self.whole()),
        ]

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._state.item_id,
            **self._kind.item,
            "status": self._state.status,
            "content": [self._part()],
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": self._kind.part_type,
            "text": self._text,
            **self._kind.part,
            **self._all_logprobs(),
        }

    def _event(self, name: str, **fields: Any) -> Event:
        return self._state.event(f"{self._kind.part_type}.{name}", content_index=0, **fields)

    def _all_logprobs(self) -> dict[str, Any]:
        """Returns the field of all logprobs. It is an iterator, which is encoded a slice at a time."""
        return self._logprobs_field(iter(self._logprobs[:]))

    def _logprobs_field(self, logprobs: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self._kind.has_logprobs else {}


Item = TextItem | CallItem


def item_maker(stem: str, offered: OfferedTools, pending: PendingLogprobs) -> Callable[[int, Part], Item]:
    """Returns a function that makes the items of one response; `stem` makes their ids its own."""

    def make(index: int, part: Part) -> Item:
        match part:
            case Content():
                return TextItem(_MESSAGE, ItemState(index, f"msg_{stem}_{index}"), pending)
            case Reasoning():
                return TextItem(_REASONING, ItemState(index, f"rs_{stem}_{index}"), pending)
            case ToolCall():
                assert part.name is not None
                tool = offered.called(part.name)
                prefix = "ctc" if tool.takes_text else "fc"
                return CallItem(part, tool, ItemState(index, f"{prefix}_{stem}_{index}"), pending)

    return make
