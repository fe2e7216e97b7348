"""What a chat model's text is made of. A parser of each choice's own turns text into parts, and nothing else does.

The text of each output is fed as it comes, and the parts that come back are formatted: as one delta of a stream, or,
added up, as the whole message. So both say the same, whatever the parser.

    outputs --text--> MessageParser --parts--> ChatChoice --> delta of a chunk | message
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thinking before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A piece of a call. The first piece of an index has id and name; the pieces' arguments concatenated are JSON."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Part = Content | Reasoning | ToolCall


class MessageParser(Protocol):
    """One per choice, fed in order. It may hold text back that could become part of a marker."""

    @property
    def is_cut(self) -> bool:
        """Whether it stands inside the arguments of a call."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now; none may be."""

    def finish(self) -> list[Part]:
        """What was held back. Called once, after the last text, however the choice ended."""


class PlainParser:
    """All text is content: where nothing can be called and the model does not think."""

    is_cut = False

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []
