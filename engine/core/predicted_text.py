"""Where an output follows the text that was predicted for it (OpenAI's predicted outputs); torch-free.

A text that is edited mostly stays as it was: the output follows the prediction, leaves it at an edit, and follows it
again behind that. Where it does, the newest tokens tell.
"""

from collections.abc import Iterable, Sequence

CERTAIN = 3
"""Tokens in a row that the output and the prediction have in common where the one follows the other; fewer are chance.
"""
_LONGEST = 8  # tokens compared to find the place: of several, the one with most before it in common is taken
_REACH = 1 << 13  # tokens looked through on either side of the place that was certain last


class PredictedText:
    """The tokens of a prediction, and the place in them that an output has reached."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = _as_text(token_ids)
        self._newest = ""  # tokens of the output
        self._next = 0  # index of the token that is predicted to come next; the prediction's length if none is
        self._anchor = 0  # the place that was certain last
        self._num_in_row = CERTAIN  # an output is expected to begin where its prediction does
        self._has_appeared = bytearray(len(token_ids))

    @property
    def num_in_row(self) -> int:
        """Number of the newest tokens that the prediction has before the place, up to `CERTAIN`; 0 if there is none."""
        return min(self._num_in_row, CERTAIN)

    @property
    def num_appeared(self) -> int:
        """Number of the prediction's tokens that appeared in the output, each counted once."""
        return self._has_appeared.count(1)

    @property
    def num_others(self) -> int:
        """Number of the prediction's tokens that did not appear in the output."""
        return self._has_appeared.count(0)

    def follow(self, token_ids: Iterable[int]) -> None:
        """Goes on with the next tokens of the output."""
        for token in _as_text(token_ids):
            self._newest = (self._newest + token)[-_LONGEST:]
            if self._text.startswith(token, self._next):
                self._next, self._num_in_row = self._next + 1, self._num_in_row + 1
            else:
                self._next, self._num_in_row = self._look_up()
            if self._num_in_row >= CERTAIN:
                self._anchor = self._next
                first = max(0, self._next - min(self._num_in_row, _LONGEST))
                self._has_appeared[first : self._next] = b"\1" * (self._next - first)

    def next_tokens(self, max_tokens: int) -> list[int]:
        """Returns the tokens that are predicted to come next, at most `max_tokens`."""
        return [ord(token) for token in self._text[self._next : self._next + max_tokens]]

    def _look_up(self) -> tuple[int, int]:
        """Returns the index behind the longest end of the output that the prediction has, and its length. Of equally
        long ones the first behind the anchor is taken, else the first before it."""
        place = len(self._text), 0
        for length in range(1, len(self._newest) + 1):  # where there is no short one there is no longer one
            at = self._find(self._newest[-length:])
            if at < 0:
                break
            place = at + length, length
        return place

    def _find(self, tokens: str) -> int:
        at = self._text.find(tokens, self._anchor, self._anchor + _REACH)
        return at if at >= 0 else self._text.find(tokens, max(0, self._anchor - _REACH), self._anchor + len(tokens))


def _as_text(token_ids: Iterable[int]) -> str:
    """Returns a string with one character per token: Python's fastest search is for those."""
    return "".join(map(chr, token_ids))
