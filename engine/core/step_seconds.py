"""What steps of a model take on a machine, by their size: plain values, between those that were tried."""

from bisect import bisect_left
from typing import NamedTuple

Curve = tuple[tuple[int, float], ...]
"""Sizes in ascending order, one at least, each with the seconds of its step."""


class StepSeconds(NamedTuple):
    """What steps take."""

    prefill: Curve
    """By their tokens."""
    decode: Curve
    """By their requests, of which each has one token."""


def seconds_at(curve: Curve, size: int) -> float:
    """Returns the seconds of a step of any size: on the line between the sizes around it, or through the two largest. A
    smaller step takes as long as the smallest."""
    sizes = [each for each, _ in curve]
    above = min(bisect_left(sizes, size), len(curve) - 1)
    if above == 0:
        return curve[0][1]
    (from_size, from_s), (to_size, to_s) = curve[above - 1 : above + 1]
    return max(from_s + (to_s - from_s) * (size - from_size) / (to_size - from_size), 0.0)
