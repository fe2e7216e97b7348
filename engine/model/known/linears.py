"""Linear layers, and MLPs of them, that the C++ layers run: which those are, and their parts."""

from typing import Any

import msgspec
from torch import Tensor, nn

from engine.model.decoder_parts import MlpParts
from engine.model.fused_modules import FusedMLP
from engine.weights.gathered_weight import own_part
from engine.weights.linear import PackedLinear
from engine.weights.linear_parts import LinearParts, linear_parts
from engine.weights.packed_weight import KernelWeight, PackedWeight
from engine.weights.quantized_weight import KernelQuantizedWeight

__all__ = ["is_known_linear", "is_known_mlp", "mlp_parts", "parts_of_linear", "weights_of_mlp"]


def is_known_linear(module: Any) -> bool:
    """Whether the module is a packed linear layer whose weight is dense, or quantized with rows of 8 bits."""
    if not isinstance(module, PackedLinear):
        return False
    own = own_part(module.packed)
    return isinstance(own, KernelWeight) or (isinstance(own, KernelQuantizedWeight) and own.row_bits == 8)


def is_known_mlp(module: nn.Module) -> bool:
    """Whether the module is a fused MLP of such layers."""
    return isinstance(module, FusedMLP) and is_known_linear(module.gate_up_proj) and is_known_linear(module.down_proj)


def weights_of_mlp(mlp: Any) -> list[PackedWeight]:
    """Returns the packed weights of a known MLP."""
    return [mlp.gate_up_proj.packed, mlp.down_proj.packed]


def parts_of_linear(linear: Any, factors: Tensor | None = None) -> LinearParts:
    """Returns the parts of a known linear layer, columns of whose product are multiplied by these factors then."""
    return msgspec.structs.replace(linear_parts(linear.packed, linear.bias), cut=linear.cut, factors=factors)


def mlp_parts(mlp: FusedMLP) -> MlpParts:
    """Returns the parts of a known MLP."""
    first, last = mlp.factors
    linears = parts_of_linear(mlp.gate_up_proj, first), parts_of_linear(mlp.down_proj, last)
    return MlpParts(*linears, mlp.activation, mlp.is_gated, mlp.names, mlp.down_name, mlp.numbers)
