"""Online linear regression of durations on amounts of work, weighted towards the newest; torch-free.

Least squares of relative errors, with forgetting and without negative coefficients, by coordinate descent. Each
duration is weighted by its inverse, so an outlier that took long counts little.
"""

from collections.abc import Sequence
from math import inf
from operator import gt, mul

_KEPT = 0.98  # of what is known, per new duration: about the newest fifty count
_KEPT_IF_SURPRISED = 0.8  # one surprise is an outlier, several in a row are a machine that has become slower
_SURPRISE = 1.5  # times the predicted duration
_NUM_SWEEPS = 8  # of coordinate descent per new duration; each starts from the solution so far
_NOTHING = 1e-9

_WITHIN = 0.95  # share of durations that the bound should hold
_MARGIN_STEP = 0.05
_FIRST_MARGIN = 1.2
_MAX_MARGIN = 2.0

Work = tuple[float, ...]
"""One number per kind of work (the step itself, tokens, ...), each with a cost of its own. Where the observed steps do
not show which kind took the time, it is ascribed to the first."""


class CostModel:
    """Predicts and bounds the duration of work. The bound is finite only for up to twice the work that was observed
    lately, and for work within `trusted`."""

    def __init__(self, trusted: Work) -> None:
        size = len(trusted)
        self._always_trusted = self._trusted = trusted
        self._coefficients = [0.0] * size
        self._products = [[0.0] * size for _ in range(size)]  # of relative amounts, summed over durations
        self._sums = [0.0] * size  # of relative amounts
        self.num_seen = 0
        """Number of durations that were observed."""
        self._margin = _FIRST_MARGIN

    @property
    def coefficients(self) -> Sequence[float]:
        """Seconds per unit of each amount."""
        return self._coefficients

    def predict(self, work: Work) -> float | None:
        """Returns the expected seconds, as likely too few as too many; None before the first observation."""
        return self._expected(work) if self.num_seen else None

    def bound(self, work: Work) -> float:
        """Returns seconds that are rarely exceeded; infinite for far more work than was observed lately. The bound
        never falls as work grows."""
        if any(map(gt, work, self._trusted)):
            return inf
        return self._margin * self._expected(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learns that `work` took `seconds`."""
        seconds = max(seconds, _NOTHING)
        ratio = seconds / (self._expected(work) or seconds)
        self._learn_margin(ratio)
        self.num_seen += 1
        doubled = (2 * amount for amount in work)
        faded = (_KEPT * trusted for trusted in self._trusted)
        self._trusted = tuple(map(max, self._always_trusted, doubled, faded))
        self._add([amount / seconds for amount in work], _KEPT if ratio < _SURPRISE else _KEPT_IF_SURPRISED)
        self._sweep()

    def _expected(self, work: Work) -> float:
        return sum(map(mul, self._coefficients, work), 0.0)

    def _learn_margin(self, ratio: float) -> None:
        """Raises the margin by much or lowers it by little, so that it settles where `_WITHIN` of the ratios lie below
        it (Robbins and Monro, 1951)."""
        change = _WITHIN if ratio > self._margin else _WITHIN - 1
        self._margin = min(max(self._margin + _MARGIN_STEP * change, 1.0), _MAX_MARGIN)

    def _add(self, relative: Sequence[float], kept: float) -> None:
        """Adds one duration to the normal equations and fades earlier ones. The amounts are divided by the duration, so
        `relative` times the coefficients should be 1."""
        for index, amount in enumerate(relative):
            self._sums[index] = kept * self._sums[index] + amount
            row = self._products[index]
            self._products[index] = [kept * old + amount * other for old, other in zip(row, relative, strict=True)]

    def _sweep(self) -> None:
        """Sets each coefficient in turn to its best value given the others, several times. Those of amounts that were
        never observed, or not lately, stay."""
        coefficients, rows = self._coefficients, enumerate(zip(self._products, self._sums, strict=True))
        seen = [(index, row, row[index], total) for index, (row, total) in rows if row[index] >= _NOTHING]
        for _ in range(_NUM_SWEEPS):
            for index, row, own, total in seen:
                rest = total - sum(map(mul, row, coefficients)) + own * coefficients[index]
                coefficients[index] = max(0.0, rest / own)
