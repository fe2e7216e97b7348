"""An answer as blocks, for the APIs that have them: each run of parts of one kind is one block, each call its own."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from server.tools.message_parts import Part, ToolCall

Event = dict[str, Any]
"""An event of a stream, named by its `type`."""


class Block(Protocol):
    def start(self) -> list[Event]: ...

    def add(self, part: Part) -> list[Event]: ...

    def end(self, is_complete: bool) -> list[Event]:
        """Returns the block's last events. `is_complete` is false for a block that was cut off."""

    def whole(self) -> dict[str, Any]:
        """Returns the block so far."""


BlockT = TypeVar("BlockT", bound=Block)


class Blocks(Generic[BlockT]):
    """Groups the parts of an answer, in their order. A streamed and a whole answer have the same blocks."""

    def __init__(self, make: Callable[[int, Part], BlockT]) -> None:
        """`make` makes the block of this index that begins with this part; the part is added to it next."""
        self._make = make
        self._kind: object = None
        self._blocks: list[BlockT] = []

    def add(self, part: Part) -> list[Event]:
        kind = part.index if isinstance(part, ToolCall) else type(part)
        events = []
        if kind != self._kind:
            events = self.end()
            self._kind = kind
            self._blocks.append(self._make(len(self._blocks), part))
            events += self._blocks[-1].start()
        return events + self._blocks[-1].add(part)

    def end(self, is_complete: bool = True) -> list[Event]:
        """Ends the last block, if there is one. Callers add nothing after that."""
        return self._blocks[-1].end(is_complete) if self._blocks else []

    def whole(self) -> list[dict[str, Any]]:
        return [block.whole() for block in self._blocks]
