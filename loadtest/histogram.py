"""Histograms of latencies as text."""

import math
from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MIN_EDGE = 0.01  # everything below is in the first bin: on a logarithmic scale zero has no place


def bar(fraction: float, width: int) -> str:
    """Returns a bar that fills `fraction` of `width` columns, to an eighth of a column; empty only for a fraction of
    0."""
    eighths = math.ceil(fraction * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def bins(values: Sequence[float], num_bins: int = 10) -> list[tuple[float, float, int]]:
    """Returns (from, below, count) of bins that widen by a constant factor; the last one includes its upper edge."""
    low, high = max(min(values), _MIN_EDGE), max(max(values), _MIN_EDGE)
    factor = (high / low) ** (1 / num_bins)
    if factor < 1.001:
        return [(min(values), high, len(values))]
    counts = [0] * num_bins
    for value in values:
        place = math.log(max(value, low) / low) / math.log(factor)
        counts[min(int(place), num_bins - 1)] += 1
    edges = [low * factor**number for number in range(num_bins + 1)]
    return [(start, end, count) for (start, end), count in zip(pairwise(edges), counts, strict=True)]


def histogram_lines(values: Sequence[float], width: int = 40) -> list[str]:
    """Returns one line per bin: its range, a bar, its count."""
    if not values:
        return []
    counted = bins(values)
    most = max(count for _, _, count in counted)
    return [
        f"{_format(start):>8} to {_format(end):<8} {bar(count / most, width):<{width}} {count}"
        for start, end, count in counted
    ]


def _format(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
