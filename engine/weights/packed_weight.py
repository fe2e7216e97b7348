"""Weights packed into the layout of their matmul, which is batch invariant: no row depends on the other rows.

`PackedWeight` is the interface of dense and quantized weights. Dense ones have three implementations: the C++ kernel
here, the one in Triton for GPUs (`engine.weights.triton_weight`), and torch with a fixed number of rows
(`engine.weights.batch_invariant_matmul`), which is the plain path of both.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from engine.weights.batch_invariant_matmul import BatchInvariantWeight

__all__ = [
    "KernelWeight",
    "PackedWeight",
    "WeightHandle",
    "check_rows",
    "multiply_rows",
    "pack_weight",
]


class PackedWeight(Protocol):
    """A weight [N, K], packed for its matmul."""

    shape: torch.Size  # [N, K]
    dtype: torch.dtype
    device: torch.device

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> x W^T + bias [T, N]; each row has the same bits whatever the other rows are and however many."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the packed weight holds."""
        ...


def pack_weight(weight: Tensor, kernels_available: bool, num_columns: int | None = None) -> PackedWeight:
    """Packs a weight [N, K], which is not kept: for the kernel of its device where that supports its dtype, else torch.

    `kernels_available` tells of the C++ kernels; those in Triton come with torch. `num_columns` are those of the whole
    matrix, if this is one rank's part of it.
    """
    if weight.device.type == "cuda" and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
        from engine.weights.triton_weight import TritonWeight  # CPU builds of torch bring no Triton

        return TritonWeight(weight, num_columns)
    if kernels_available and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16):
        return KernelWeight(weight)
    return BatchInvariantWeight(weight)


def multiply_rows(packed: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies x [..., K] by the packed weight; returns [..., N]."""
    num_out, num_in = packed.shape
    return packed.multiply(x.reshape(-1, num_in), bias).view(*x.shape[:-1], num_out)


def check_rows(x: Tensor, shape: torch.Size) -> None:
    """Raises RuntimeError unless rows x [T, K] fit a weight of that shape; the kernels know only its padded shape."""
    if x.dim() != 2 or x.shape[1] != shape[1]:
        raise RuntimeError(f"rows {[*x.shape]} do not fit a weight {[*shape]}")


class KernelWeight:
    """A dense weight for the C++ kernel: float32 or bfloat16, on the CPU; the same bits on any number of threads.

    Where the kernel has AVX2 or AVX512, bfloat16 is losslessly coded in 12 bits a number, or 11 with AMX, if the
    weight's numbers allow it and `may_be_coded`. Products are the same, bit for bit.
    """

    bits = 0
    """Bits of a quantized code: none, the weight is dense."""

    def __init__(self, weight: Tensor, may_be_coded: bool = True) -> None:  # [N, K]
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.packed: Tensor = torch.ops.twostep.pack_weight(weight.detach(), may_be_coded)

    @classmethod
    def from_packed(cls, packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> "KernelWeight":
        """Returns the weight of this shape [N, K] and dtype that was packed before, as `packed`."""
        weight = cls.__new__(cls)
        weight.shape, weight.dtype, weight.device, weight.packed = shape, dtype, packed.device, packed
        return weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        check_rows(x, self.shape)
        return cast(Tensor, torch.ops.twostep.linear(x, self.packed, bias, self.shape[0]))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


class WeightHandle:
    """Replaces a module's `weight`: it has the same shape, dtype and device, and multiplies in `F.linear`.

    It also multiplies a transposed row of tokens from the left, `weight @ x`. It is not a tensor: model code that would
    read the numbers fails loudly instead of computing something else.
    """

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed
        self.shape, self.dtype, self.device = packed.shape, packed.dtype, packed.device

    def __matmul__(self, x: Tensor) -> Tensor:  # [..., K, T] -> [..., N, T]
        return multiply_rows(self.packed, x.transpose(-1, -2).contiguous(), None).transpose(-1, -2)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        if func is not nn.functional.linear:
            raise NotImplementedError(f"this weight is packed for F.linear; {func} cannot read it")
        return cls._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: Tensor, weight: "WeightHandle", bias: Tensor | None = None) -> Tensor:
        return multiply_rows(weight.packed, input, bias)
