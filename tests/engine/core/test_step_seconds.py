"""Seconds of steps between the sizes that were tried."""

import pytest

from engine.core.step_seconds import seconds_at

CURVE = ((10, 1.0), (20, 2.0), (40, 3.0))


@pytest.mark.parametrize(
    ("size", "seconds"), [(1, 1.0), (10, 1.0), (15, 1.5), (20, 2.0), (30, 2.5), (40, 3.0), (60, 4.0)]
)
def test_sizes_between_those_tried_are_on_a_line(size: int, seconds: float) -> None:
    assert seconds_at(CURVE, size) == pytest.approx(seconds)


def test_one_size_stands_for_all() -> None:
    assert seconds_at(((8, 0.5),), 1) == seconds_at(((8, 0.5),), 99) == 0.5
