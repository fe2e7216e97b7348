"""Which weight of a model is packed in which form."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.weights.affine_quantization import BITS
from engine.weights.packed_weight import PackedWeight, pack_weight
from engine.weights.quantized_weight import KernelQuantizedWeight, TorchQuantizedWeight

__all__ = ["Pack", "Packing", "packing_for"]

Pack = Callable[[Tensor], PackedWeight]  # of a weight [N, K], which is not kept


@dataclass(frozen=True, slots=True)
class Packing:
    """How each kind of weight is packed."""

    layers: Pack
    """Linear layers and experts."""
    head: Pack
    """The layer that makes logits: 8 bits for rows of 16, since an error there reaches the tokens undiluted."""
    routers: Pack
    """Never quantized: they are small, and a wrong choice of experts costs much."""


def packing_for(quantization: str, kernels_available: bool) -> Packing:
    """quantization: none, or a name in `BITS`."""
    dense = functools.partial(pack_weight, kernels_available=kernels_available)
    if quantization == "none":
        return Packing(layers=dense, head=dense, routers=dense)
    bits = BITS[quantization]
    if not kernels_available:
        layers, head = (functools.partial(TorchQuantizedWeight, bits=each) for each in (bits, 8))
        return Packing(layers=layers, head=head, routers=dense)
    return Packing(
        layers=functools.partial(KernelQuantizedWeight, bits=bits),
        head=functools.partial(KernelQuantizedWeight, bits=8, row_bits=16),
        routers=dense,
    )
