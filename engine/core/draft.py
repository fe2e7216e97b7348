"""Draft tokens of one request, and who proposes them; plain values, so that a request can hold its drafter."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    token_ids: Sequence[int]
    chance: float
    """Of each to be right, if those before it are."""

    @property
    def num_expected(self) -> float:
        """Tokens that will be right: all before the first that is wrong."""
        return sum(self.chance ** (index + 1) for index in range(len(self.token_ids)))


NO_DRAFT = Draft((), 0.0)


class Drafter(Protocol):
    """One request's own, and gone with it."""

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        """At most `max_tokens` that may follow these, which only ever grow."""


class NoDrafts:
    """Guesses nothing: the "off" state."""

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return NO_DRAFT
