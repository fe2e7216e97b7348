"""Guesses what a request says next from what it said before (prompt lookup decoding, Saxena 2023); torch-free.

Texts repeat themselves and their prompts: code that is edited, documents that are quoted, names and tables. Where the
newest tokens stood before, what followed them there is the guess.
"""

from array import array
from collections.abc import Sequence

from engine.core.draft import Draft

_LONGEST, _SHORTEST = 4, 2  # tokens that must have stood there before; the longest match is taken
_REACH = 1 << 13  # tokens looked back
_TOKEN_TYPE, _TOKEN_BYTES = "i", 4
_FIRST_CHANCE = 0.5
_LEARNING = 0.15  # how much a guess that is checked says about the next one


def learnt(chance: float, guess: Sequence[int], said: Sequence[int], learning: float = _LEARNING) -> float:
    """The chance of tokens to be right, after what was said told it of this guess: of all up to its first error."""
    for guessed, token_id in zip(guess, said, strict=False):
        chance += learning * ((guessed == token_id) - chance)
        if guessed != token_id:
            break
    return chance


class PromptLookup:
    """Learns how often it is right from every guess, tried or not, and for each length of a match apart."""

    def __init__(self) -> None:
        self._text = bytearray()  # all tokens so far
        self._guess: list[int] = []  # what was to follow them
        self._match_length = 0
        self._chances = [_FIRST_CHANCE] * (_LONGEST + 1)

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        self._read(prompt, output)
        self._guess = self._look_up(max_tokens)
        return Draft(self._guess, self._chances[self._match_length])

    def _read(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Take the new tokens in, and learn what the last guess was worth, as far as they tell: to its first error."""
        num_old = len(self._text) // _TOKEN_BYTES
        new = [*prompt[num_old:], *output[max(0, num_old - len(prompt)) :]]
        self._chances[self._match_length] = learnt(self._chances[self._match_length], self._guess, new)
        self._text += array(_TOKEN_TYPE, new).tobytes()

    def _look_up(self, max_tokens: int) -> list[int]:
        """What followed the newest tokens where they last stood. A match may reach into what it guesses: a text that
        repeats itself goes on to."""
        known: list[int] = []
        for length in range(_SHORTEST, _LONGEST + 1):  # where there is no short match there is no longer one
            at = self._find(length)
            if at is None:
                break
            self._match_length = length
            known = self._tokens_from(at + length, max_tokens)
        return [known[i % len(known)] for i in range(max_tokens)] if known else []

    def _find(self, length: int) -> int | None:
        """Number of the token at which the newest `length` tokens stood before."""
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
