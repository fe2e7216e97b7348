"""The parts of a linear layer that the kernels know: packed tensors and plain numbers, and no module of torch."""

from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.weights.gathered_weight import GatheredWeight
from engine.weights.packed_weight import KernelWeight, PackedWeight
from engine.weights.partition import Cut
from engine.weights.quantized_weight import KernelQuantizedWeight
from engine.weights.rank_group import Gather

__all__ = ["LinearParts", "linear_parts"]


class LinearParts(msgspec.Struct, frozen=True, eq=False):
    """A matrix packed for the kernels, [out_features, in_features]."""

    packed: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    dtype: torch.dtype
    """Type of the rows that it multiplies."""
    bits: int
    """Bits of a quantized weight's codes; none of a dense one."""
    row_bits: int
    """Bits to which rows are rounded; none for a dense weight."""
    before: Gather | None = None
    """What gathers all ranks' columns of the rows, where these are one rank's parts of a layer."""
    after: Gather | None = None
    """What gathers those of the product."""
    cut: Cut | None = None
    """Which part of a layer this is, if it is one rank's; then `out_features` are the part's."""
    factors: Tensor | None = None  # [out_features], float32
    """What columns of the product are multiplied by, if by anything: of a whole layer's."""

    @property
    def num_columns(self) -> int:
        """Output features of the layer on all ranks together."""
        return self.out_features if self.cut is None else self.cut.num_columns

    def bound(self) -> Any:
        further = self.before, self.after, self.factors
        return torch.classes.twostep.Linear(self.packed, self.bias, self.out_features, self.bits, *further)

    @property
    def weight(self) -> KernelWeight | KernelQuantizedWeight:
        """The weight by itself, which multiplies rows outside the C++ layers."""
        shape = torch.Size((self.out_features, self.in_features))
        if self.bits:
            return KernelQuantizedWeight.from_packed(self.packed, shape, self.dtype, self.bits, self.row_bits)
        return KernelWeight.from_packed(self.packed, shape, self.dtype)


def linear_parts(weight: PackedWeight, bias: Tensor | None) -> LinearParts:
    """Returns the parts of a weight that is packed for the kernels, and of its bias."""
    if isinstance(weight, GatheredWeight):
        own = linear_parts(weight.own, weight.own_bias(bias))
        return msgspec.structs.replace(own, before=weight.before, after=weight.after)
    assert isinstance(weight, KernelWeight | KernelQuantizedWeight), "only the kernels' weights have parts"
    row_bits = weight.row_bits if isinstance(weight, KernelQuantizedWeight) else 0
    num_out, num_in = weight.shape
    return LinearParts(weight.packed, bias, num_out, num_in, weight.dtype, weight.bits, row_bits)
