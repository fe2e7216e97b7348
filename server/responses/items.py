"""The items of a response's output: each as events while it is written, and whole."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.chat.blocks import Event
from server.tools.message_parts import Content, Part, Reasoning, ToolCall


class PendingLogprobs:
    """Logprobs of tokens whose text is not part of an item yet."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def add(self, entries: Iterable[dict[str, Any]]) -> None:
        self._entries += entries

    def take(self) -> list[dict[str, Any]]:
        taken, self._entries = self._entries, []
        return taken

    def take_beginning_with(self, text: str) -> list[dict[str, Any]]:
        """Take the logprobs from the text's first token on. Those before it are of marks, as that behind the thinking,
        which add no text: they are dropped."""
        taken, data = self.take(), text.encode()
        written, offset = b"".join(bytes(each["bytes"]) for each in taken), 0
        for start, each in enumerate(taken):
            if written.startswith(data, offset):
                return taken[start:]
            offset += len(each["bytes"])
        return taken[-1:]  # a token that is mark and text in one


@dataclass(slots=True)
class _ItemState:
    """The index, id and status of an item, and the events that have them."""

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
    """The fields in which messages and thinking differ."""

    part_type: str
    item: Mapping[str, Any]
    part: Mapping[str, Any] = field(default_factory=dict)
    has_logprobs: bool = False


_MESSAGE = _Kind("output_text", {"type": "message", "role": "assistant"}, {"annotations": []}, has_logprobs=True)
_REASONING = _Kind("reasoning_text", {"type": "reasoning", "summary": []})


class TextItem:
    """A message, or the thinking before it: an item with one part of text."""

    def __init__(self, kind: _Kind, state: _ItemState, pending: PendingLogprobs) -> None:
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


class CallItem:
    """A call of a function."""

    def __init__(self, call: ToolCall, state: _ItemState, pending: PendingLogprobs) -> None:
        self._call = call
        self._state = state
        self._pending = pending
        self._arguments = ""

    def start(self) -> list[Event]:
        return [self._state.added(self.whole())]

    def add(self, part: Part) -> list[Event]:
        assert isinstance(part, ToolCall)
        self._pending.take()
        if not part.arguments:
            return []
        self._arguments += part.arguments
        return [self._state.event("function_call_arguments.delta", delta=part.arguments)]

    def end(self, is_complete: bool) -> list[Event]:
        self._state.end(is_complete)
        done = self._state.event(
            "function_call_arguments.done", name=self._call.name, arguments=self._arguments
        )  # fmt: skip
        return [done, self._state.done(self.whole())]

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._state.item_id,
            "type": "function_call",
            "status": self._state.status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": self._arguments,
        }


Item = TextItem | CallItem


def item_maker(stem: str, pending: PendingLogprobs) -> Callable[[int, Part], Item]:
    """Returns a function that makes the items of one response; `stem` makes their ids its own."""

    def make(index: int, part: Part) -> Item:
        match part:
            case Content():
                return TextItem(_MESSAGE, _ItemState(index, f"msg_{stem}_{index}"), pending)
            case Reasoning():
                return TextItem(_REASONING, _ItemState(index, f"rs_{stem}_{index}"), pending)
            case ToolCall():
                return CallItem(part, _ItemState(index, f"fc_{stem}_{index}"), pending)

    return make
