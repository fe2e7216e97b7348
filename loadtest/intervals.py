"""Confidence intervals of ratios that were measured in pairs."""

import math
import statistics
from collections.abc import Sequence

MIN_ROUNDS = 3  # with two, the interval of a ratio is so wide that it says nothing


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of the geometric mean; None for fewer than `MIN_ROUNDS` ratios, or where one
    is 0. It is Student's interval of the logarithms, for which twice and half as much are equally far from 1."""
    if len(ratios) < MIN_ROUNDS or min(ratios) <= 0:
        return None
    logarithms = [math.log(ratio) for ratio in ratios]
    reach = t_quantile(len(ratios) - 1) * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    middle = statistics.fmean(logarithms)
    return math.exp(middle - reach), math.exp(middle + reach)


def t_quantile(degrees: int) -> float:
    """Returns what a variable of Student's distribution stays within, on both sides, with a probability of 95 %."""
    low, high = 0.0, 20.0  # 12.7 for one degree of freedom
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, degrees) < 0.95 else (low, middle)
    return high


def _probability_within(t: float, degrees: int) -> float:
    """Returns P(|T| < t) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cos2 = math.cos(angle) ** 2
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for number in range(1 + is_odd, degrees, 2):
        total += term
        term *= cos2 * number / (number + 1)
    if not is_odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)
