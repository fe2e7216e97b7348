"""Prompt lookup: drafts the next tokens from a request's own prompt and output (n-gram matches, Saxena 2023);
torch-free.

Texts repeat themselves and their prompts: code that is edited, documents that are quoted, names and tables. Where the
newest tokens occurred before, what followed them there is the draft.
"""

from array import array
from collections.abc import Sequence

from engine.core.draft import Draft

_LONGEST, _SHORTEST = 4, 2  # tokens of an n-gram that must have occurred before; the longest match is taken
_REACH = 1 << 13  # tokens looked back
_TOKEN_TYPE, _TOKEN_BYTES = "i", 4
_FIRST_CHANCE = 0.5
_LEARNING = 0.15  # weight of one verified draft token against those before


def updated_chance(chance: float, draft: Sequence[int], sampled: Sequence[int], learning: float = _LEARNING) -> float:
    """Returns the chance that a draft token is accepted, updated by those of `draft` that can be compared with what was
    `sampled`: all up to the first that differs."""
    for drafted, token_id in zip(draft, sampled, strict=False):
        chance += learning * ((drafted == token_id) - chance)
        if drafted != token_id:
            break
    return chance


class PromptLookup:
    """Drafts by prompt lookup. The chance of acceptance is learnt from every draft, whether a step verified it or not,
    and separately for each match length."""

    def __init__(self) -> None:
        self._text = bytearray()  # all tokens so far
        self._draft: list[int] = []  # of what follows them
        self._match_length = 0
        self._chances = [_FIRST_CHANCE] * (_LONGEST + 1)

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        self._read(prompt, output)
        self._draft = self._look_up(max_tokens)
        return Draft(self._draft, self._chances[self._match_length])

    def _read(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Adds the new tokens to the text, and learns how many of the last draft they confirm."""
        num_old = len(self._text) // _TOKEN_BYTES
        new = [*prompt[num_old:], *output[max(0, num_old - len(prompt)) :]]
        self._chances[self._match_length] = updated_chance(self._chances[self._match_length], self._draft, new)
        self._text += array(_TOKEN_TYPE, new).tobytes()

    def _look_up(self, max_tokens: int) -> list[int]:
        """Returns what followed the newest tokens where they last occurred. The match may overlap with its own draft: a
        text that repeats itself is drafted to go on so."""
        known: list[int] = []
        for length in range(_SHORTEST, _LONGEST + 1):  # where there is no short match there is no longer one
            at = self._find(length)
            if at is None:
                break
            self._match_length = length
            known = self._tokens_from(at + length, max_tokens)
        return [known[i % len(known)] for i in range(max_tokens)] if known else []

    def _find(self, length: int) -> int | None:
        """Returns the index at which the newest `length` tokens last occurred before; None if they did not."""
        size = length * _TOKEN_BYTES
        if len(self._text) <= size:
            return None
        newest, first = self._text[-size:], max(0, len(self._text) - _REACH * _TOKEN_BYTES)
        at = self._text.rfind(newest, first, len(self._text) - _TOKEN_BYTES)
        while at % _TOKEN_BYTES and at >= 0:  # bytes of neighbours
            at = self._text.rfind(newest, first, at + size - 1)
        return None if at < 0 else at // _TOKEN_BYTES

    def _tokens_from(self, number: int, count: int) -> list[int]:
        start = number * _TOKEN_BYTES
        return [*array(_TOKEN_TYPE, bytes(self._text[start : start + count * _TOKEN_BYTES]))]
