"""What a model's text is made of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Calls of one message are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, as the model wrote them: JSON, if the model writes what it should."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments
