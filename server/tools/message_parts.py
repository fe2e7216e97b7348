"""The parts of a chat message: content, reasoning and tool calls. Only a choice's parser turns its text into parts.

The text of each output is fed as it comes, and the parts that come back are formatted: as one delta of a stream, or,
added up, as the whole message. So both are the same, whatever the parser.

    outputs --text--> MessageParser --parts--> ChatChoice --> delta of a chunk | message
"""

from collections.abc import Sequence
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
Thought = tuple[int, int | None]
"""A half-open range of a text's characters, marks included; without an end while the thought has none."""


class MessageParser(Protocol):
    """Parses the text of one choice, fed in order. It may hold back text that could become part of a mark."""

    @property
    def is_cut(self) -> bool:
        """Whether the text so far ends inside the arguments of a call."""

    @property
    def thoughts(self) -> Sequence[Thought]:
        """Where in the text thoughts were found so far."""

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that have become certain, which may be none."""

    def finish(self) -> list[Part]:
        """Returns what was held back. Called once, after the last text, however the choice ended."""


class PlainParser:
    """Parses all text as content, for requests without tools to a model that does not think."""

    is_cut = False
    thoughts = ()

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []
