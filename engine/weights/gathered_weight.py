"""One rank's part of a weight, whose product is gathered from all ranks."""

import torch
from torch import Tensor

from engine.weights.packed_weight import PackedWeight
from engine.weights.partition import Cut
from engine.weights.rank_group import Gather, RankGroup

__all__ = ["GatheredWeight", "gathered", "own_part"]


class GatheredWeight:
    """A `PackedWeight` of which this rank has some output columns.

    Where its input is this rank's part of the rows, all ranks' columns of them are gathered before; where its output is
    the whole product, those are gathered after. To its users it has the sizes of its input and output.
    """

    def __init__(self, own: PackedWeight, cut: Cut, group: RankGroup) -> None:
        self.own: PackedWeight = own
        self._cut = cut
        self.before = None if cut.input_starts is None else group.gather(cut.input_starts)
        self.after = None if cut.output_starts is None else group.gather(cut.output_starts)
        num_out, num_in = own.shape
        if cut.input_starts is not None:
            num_in = cut.input_starts[group.rank + 1] - cut.input_starts[group.rank]
        if cut.output_starts is not None:
            num_out = cut.output_starts[-1]
        self.shape, self.dtype, self.device = torch.Size((num_out, num_in)), own.dtype, own.device

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], bias [N] -> x W^T + bias [T, N], where N and K are those of `shape`."""
        product = self.own.multiply(_run(self.before, x), self.own_bias(bias))
        return _run(self.after, product)

    def own_bias(self, bias: Tensor | None) -> Tensor | None:
        """Returns the part of a bias [N] that belongs to the own columns."""
        return None if bias is None else self.own_columns(bias)

    def own_columns(self, columns: Tensor) -> Tensor:
        """Returns the own columns [..., own N] of all that the product has [..., N]."""
        return columns if self.after is None else self._cut.own(columns.t()).t().contiguous()

    @property
    def nbytes(self) -> int:
        return self.own.nbytes


def gathered(own: PackedWeight, cut: Cut | None, group: RankGroup) -> PackedWeight:
    """Returns the weight with what is gathered before and after it."""
    if cut is None or (cut.input_starts is None and cut.output_starts is None):
        return own
    return GatheredWeight(own, cut, group)


def own_part(weight: PackedWeight) -> PackedWeight:
    """Returns what this rank multiplies by."""
    return weight.own if isinstance(weight, GatheredWeight) else weight


def _run(gather: Gather | None, x: Tensor) -> Tensor:
    return x if gather is None else gather.run(x)
