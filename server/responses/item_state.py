"""What all items of a response's output have: index, id and status; and logprobs of text that is not in an item yet."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.chat.blocks import Event


@dataclass(slots=True)
class ItemState:
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
