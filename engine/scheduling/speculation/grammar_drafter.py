"""Guesses of what a grammar leaves no choice about: keys, quotes and brackets of JSON; torch-free."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from engine.core.draft import Draft, Drafter
from engine.scheduling.speculation.prompt_lookup import learnt

_FIRST_CHANCE = 0.8  # the text is certain; only its tokens are not
_LEAST_CHANCE = 0.1  # of a guess and all before it to be right: to find less likely ones takes time, too


class GrammarDrafter:
    """A request's drafter under a grammar. Of its guess and another drafter's, the one that promises more tokens."""

    def __init__(self, forced_tokens: Callable[[Sequence[int], int], Sequence[int]], other: Drafter) -> None:
        """`forced_tokens` gives the likeliest tokens after an output, so many at most, as far as their text is
        certain."""
        self._forced_tokens = forced_tokens
        self._other = other
        self._guess: Sequence[int] = ()
        self._num_said = 0  # before the guess
        self._chance = _FIRST_CHANCE

    def draft(self, prompt: Sequence[int], output: Sequence[int], max_tokens: int) -> Draft:
        self._chance = learnt(self._chance, self._guess, output[self._num_said :])
        num_likely = sum(self._chance ** (index + 1) >= _LEAST_CHANCE for index in range(max_tokens))
        self._guess = self._forced_tokens(output, min(max(num_likely, 1), max_tokens))  # with none, nothing is learnt
        self._num_said = len(output)
        forced = Draft(self._guess, self._chance)
        return max(forced, self._other.draft(prompt, output, max_tokens), key=attrgetter("num_expected"))
