"""Stop strings: where one of them ends a text that arrives in pieces, and how much must be held back meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundStop:
    """A stop string found in the text."""

    string: str
    end: int
    """Index in the text of the last `feed`, just behind the stop string's last character."""


class StopStringFinder:
    """Searches for several strings in a text that arrives in pieces (Knuth, Morris and Pratt 1977, one automaton
    each)."""

    def __init__(self, strings: Sequence[str]) -> None:
        # Longest first: of several that end at the same character, the first in this order is reported.
        self._automata = [(string, _borders(string)) for string in sorted(strings, key=len, reverse=True)]
        self._matched = [0] * len(strings)  # characters of each string that the text so far ends with

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may be the beginning of a match."""
        return max(self._matched)

    def feed(self, text: str, may_stop: bool) -> FoundStop | None:
        """Returns the first match that ends in `text`; without `may_stop`, matches that end in it are ignored."""
        for position, character in enumerate(text):
            string = self._advance(character)
            if string is not None and may_stop:
                return FoundStop(string, position + 1)
        return None

    def _advance(self, character: str) -> str | None:
        """Returns the longest string that is complete with this character."""
        found = None
        for index, (string, borders) in enumerate(self._automata):
            length = self._matched[index]
            while length and string[length] != character:
                length = borders[length - 1]
            if string[length] == character:
                length += 1
            if length == len(string):
                found = found or string
                length = borders[length - 1]
            self._matched[index] = length
        return found


def _borders(string: str) -> list[int]:
    """Returns, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        length += string[index] == string[length]
        borders[index] = length
    return borders
