"""A product before its last sums."""

from typing import NamedTuple

from torch import Tensor


class SegmentSums(NamedTuple):
    """A product whose segments along K are still to be added, in their order, and then the bias; the sum is rounded."""

    segments: Tensor  # [segments, T, N] float32
    bias: Tensor | None  # [N]
