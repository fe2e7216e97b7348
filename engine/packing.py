"""Which weight of a model is packed in which form."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.packed_weight import PackedWeight, pack_weight
from engine.quantization import BITS
from engine.quantized_weight import KernelQuantizedWeight, TorchQuantizedWeight

__all__ = ["Pack", "Packing", "packing_for"]

Pack = Callable[[Tensor], PackedWeight]  # of a weight [N, K], which is not kept


@dataclass(frozen=True, slots=True)
class Packing:
    """How each kind of weight is packed."""

    layers: Pack
    """Linear layers and experts."""
    head: Pack
    """The layer that makes logits: never under 8 bits, since an error there reaches the tokens undiluted."""
    routers: Pack
    """Never quantized: they are small, and a wrong choice of experts costs much."""


def packing_for(quantization: str, kernels_available: bool) -> Packing:
    """quantization: none, or a name in `BITS`."""
    dense = functools.partial(pack_weight, kernels_available=kernels_available)
    if quantization == "none":
        return Packing(layers=dense, head=dense, routers=dense)
    quantized = KernelQuantizedWeight if kernels_available else TorchQuantizedWeight
    bits = BITS[quantization]
    return Packing(
        layers=functools.partial(quantized, bits=bits), head=functools.partial(quantized, bits=8), routers=dense
    )
