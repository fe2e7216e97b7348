"""A linear law of durations, fitted to the newest ones while they come: work in, seconds out; torch-free.

Least squares of relative errors, with forgetting and without negative coefficients, by coordinate descent. A duration
counts by its inverse, so one that an accident made long counts little.
"""

from collections.abc import Sequence
from math import inf
from operator import mul

_KEPT = 0.98  # of what is known, per new duration: about the newest fifty count
_KEPT_IF_SURPRISED = 0.8  # one of these is an accident, a row of them a machine that has become slower
_SURPRISE = 1.5  # times the predicted duration
_NUM_SWEEPS = 8  # towards the solution, per new duration; each goes on from the one before
_NOTHING = 1e-9

_WITHIN = 0.95  # share of durations that the bound should hold
_MARGIN_STEP = 0.05
_FIRST_MARGIN = 1.2
_MAX_MARGIN = 2.0

Work = tuple[float, ...]
"""One number per kind of work (the step itself, tokens, ...), each with a cost of its own. Where the observed steps do
not show which kind took the time, it is ascribed to the first."""


class CostModel:
    """A bound is given only for work that was seen lately, at most doubled, or that is within `trusted`; beyond that it
    is infinite."""

    def __init__(self, trusted: Work) -> None:
        size = len(trusted)
        self._always_trusted = self._trusted = trusted
        self._coefficients = [0.0] * size
        self._products = [[0.0] * size for _ in range(size)]  # of relative amounts, summed over durations
        self._sums = [0.0] * size  # of relative amounts
        self.num_seen = 0
        """Durations so far."""
        self._margin = _FIRST_MARGIN

    @property
    def coefficients(self) -> Sequence[float]:
        """Seconds per unit of each amount."""
        return self._coefficients

    def predict(self, work: Work) -> float | None:
        """Seconds, as likely too few as too many; None before anything was seen."""
        return self._expected(work) if self.num_seen else None

    def bound(self, work: Work) -> float:
        """Seconds that are rarely exceeded; infinite for far more than was seen lately. Never falls as work grows."""
        if any(amount > trusted for amount, trusted in zip(work, self._trusted, strict=True)):
            return inf
        return self._margin * self._expected(work)

    def observe(self, work: Work, seconds: float) -> None:
        """That work took so long."""
        seconds = max(seconds, _NOTHING)
        ratio = seconds / (self._expected(work) or seconds)
        self._learn_margin(ratio)
        self.num_seen += 1
        doubled = (2 * amount for amount in work)
        faded = (_KEPT * trusted for trusted in self._trusted)
        self._trusted = tuple(map(max, self._always_trusted, doubled, faded))
        self._add([amount / seconds for amount in work], _KEPT if ratio < _SURPRISE else _KEPT_IF_SURPRISED)
        for _ in range(_NUM_SWEEPS):
            self._sweep()

    def _expected(self, work: Work) -> float:
        return sum(map(mul, self._coefficients, work), 0.0)

    def _learn_margin(self, ratio: float) -> None:
        """Up by much or down by little: it rests where `_WITHIN` of the ratios lie below (Robbins and Monro, 1951)."""
        change = _WITHIN if ratio > self._margin else _WITHIN - 1
        self._margin = min(max(self._margin + _MARGIN_STEP * change, 1.0), _MAX_MARGIN)

    def _add(self, relative: Sequence[float], kept: float) -> None:
        """One more duration, and less of those before: `relative` times the coefficients should be 1."""
        for index, amount in enumerate(relative):
            self._sums[index] = kept * self._sums[index] + amount
            row = self._products[index]
            self._products[index] = [kept * old + amount * other for old, other in zip(row, relative, strict=True)]

    def _sweep(self) -> None:
        """Each coefficient in turn takes its best value beside the others."""
        for index, row in enumerate(self._products):
            own = row[index]
            if own < _NOTHING:
                continue  # none of it was seen, or not for long: what was known of it holds
            old = self._coefficients[index]
            rest = self._sums[index] - sum(map(mul, row, self._coefficients)) + own * old
            self._coefficients[index] = max(0.0, rest / own)
