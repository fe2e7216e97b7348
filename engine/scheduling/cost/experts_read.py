"""Which share of a model's experts steps read, learnt by the number of their tokens; torch-free.

Where each token chooses at random, a step reads the more of them the more tokens it has. Rows of one text, or a router
that prefers some experts, choose fewer: how many times fewer is learnt for numbers of tokens around each power of two.
"""

from collections.abc import Callable
from math import log2

_KEPT = 0.9  # of what is known, per step


class ExpertsRead:
    """Expects shares of the experts: at first those of a choice at random, later those that steps read."""

    def __init__(self, at_random: Callable[[int], float]) -> None:
        """`at_random` returns the share that a step of so many tokens would read if each chose its own at random."""
        self._at_random = at_random
        self._ratios = {0: 1.0}  # of shares to those at random, around each power of two

    def expected(self, num_tokens: int) -> float:
        """Returns the expected share that a step of `num_tokens` reads. It never falls below that of one token."""
        share = self._at_random(num_tokens)
        learnt = share * self._ratio(num_tokens) if share else share
        return max(learnt, self._at_random(min(num_tokens, 1)))

    def observe(self, num_tokens: int, share: float) -> None:
        """Learns that a step of `num_tokens` read that share."""
        expected = self._at_random(num_tokens)
        if num_tokens < 2 or not expected:
            return
        ratio = share / expected
        error = ratio - self._ratio(num_tokens)
        for power, weight in _around(num_tokens):
            known = self._ratios.get(power)
            self._ratios[power] = ratio if known is None else known + (1 - _KEPT) * weight * error

    def _ratio(self, num_tokens: int) -> float:
        """Returns the ratio between those of the next powers of two. One that no step was near is as the nearest."""
        return sum(weight * self._ratios[self._nearest(power)] for power, weight in _around(num_tokens))

    def _nearest(self, power: int) -> int:
        return min(self._ratios, key=lambda known: abs(known - power))


def _around(num_tokens: int) -> list[tuple[int, float]]:
    """Returns the powers of two on both sides of a number, and how near it is to each."""
    power = log2(max(num_tokens, 1))
    low = int(power)
    return [(low, 1 - (power - low)), (low + 1, power - low)]
