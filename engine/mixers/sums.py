"""Sums whose order is fixed by their length alone; torch's own differ with the shape of the tensor."""

from torch import Tensor

__all__ = ["fixed_sum", "halved_sum"]

_NUM_PARTS = 4


def fixed_sum(terms: Tensor, dim: int) -> Tensor:
    """Sums over `dim`: four partial sums, of which each takes every fourth term in order, and then their tree. It is
    the order of the kernels."""
    size = terms.shape[dim]
    shape = list(terms.shape)
    shape[dim] = _NUM_PARTS
    parts = terms.new_zeros(shape)
    for at in range(0, size, _NUM_PARTS):
        count = min(_NUM_PARTS, size - at)
        parts.narrow(dim, 0, count).add_(terms.narrow(dim, at, count))
    return halved_sum(parts, dim)


def halved_sum(terms: Tensor, dim: int) -> Tensor:
    """Sums over `dim` as a tree of halves."""
    while (size := terms.shape[dim]) > 1:
        half = (size + 1) // 2
        upper = terms.narrow(dim, half, size - half)
        total = terms.narrow(dim, 0, half).clone()
        total.narrow(dim, 0, size - half).add_(upper)
        terms = total
    return terms.select(dim, 0)
