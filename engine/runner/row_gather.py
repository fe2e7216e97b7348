"""Some rows of a batch's logits, which are large: a copy takes longer than what is done with them."""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["take_rows"]


def take_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """`rows`, at least one, in ascending order. Where they lie side by side it is a view."""
    first, end = rows[0], rows[-1] + 1
    return logits[first:end] if end - first == len(rows) else logits[[*rows]]
