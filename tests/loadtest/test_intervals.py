import math
import random

import pytest

from loadtest.intervals import ratio_interval, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (100, 1.984)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=5e-4)


def test_an_interval_is_that_of_the_logarithms() -> None:
    interval = ratio_interval([math.exp(value) for value in (0.1, 0.2, 0.3)])
    reach = 4.303 * 0.1 / math.sqrt(3)
    assert interval == pytest.approx((math.exp(0.2 - reach), math.exp(0.2 + reach)), rel=1e-4)


def test_intervals_hold_the_true_ratio_in_95_of_100_experiments() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(1000):
        interval = ratio_interval([1.1 * math.exp(draw.gauss(0, 0.2)) for _ in range(5)])
        assert interval is not None
        held += interval[0] <= 1.1 <= interval[1]
    assert held == pytest.approx(950, abs=25)
