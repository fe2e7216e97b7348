"""Draft tokens of one request, and the drafter that proposes them; plain values, so that a request can hold one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """Draft tokens that may follow a request's tokens."""

    token_ids: Sequence[int]
    chance: float
    """Probability of each draft token to be accepted, given that those before it are (its acceptance rate)."""

    @property
    def num_expected(self) -> float:
        """Expected number of accepted draft tokens: those before the first that is rejected."""
        return sum(self.chance ** (index + 1) for index in range(len(self.token_ids)))


NO_DRAFT = Draft((), 0.0)


class Drafter(Protocol):
    """Proposes draft tokens for one request, which owns it."""

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        """Returns at most `max_tokens` draft tokens to follow `prompt` and `output`, which only ever grow."""


class NoDrafts:
    """Proposes nothing: the "off" state."""

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        return NO_DRAFT
