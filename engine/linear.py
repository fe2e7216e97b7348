"""Linear layers whose result for a row does not depend on the other rows: prepacked weights, one fixed sum order.

`prepare_linears` swaps every linear layer of a model in place. What it could not make batch invariant, it names.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

__all__ = [
    "FixedTileWeight",
    "KernelWeight",
    "LinearReport",
    "PackedLinear",
    "PackedWeight",
    "prepare_linears",
]

TILE_ROWS = 16  # rows of every matrix product of FixedTileWeight


class PackedWeight(Protocol):
    """A weight [N, K] in the form its multiplication wants."""

    shape: torch.Size  # [N, K]
    dtype: torch.dtype
    device: torch.device

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> x W^T + bias [T, N], each row bit-equal whatever the other rows are and however many."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds."""
        ...


Packer = Callable[[Tensor], PackedWeight]


class KernelWeight:
    """Multiplies through the C++ kernel: float32 or bfloat16, on the CPU."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._packed: Tensor = torch.ops.twostep.pack_weight(weight.detach())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return cast(Tensor, torch.ops.twostep.linear(x, self._packed, bias, self.shape[0]))

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes


class FixedTileWeight:
    """Multiplies through torch, any device and dtype, always exactly TILE_ROWS rows at a time.

    Torch's libraries choose their sum order by the number of rows. With that number fixed (the last tile is filled up
    with zeros), the order is fixed, too.
    """

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._is_prepacked = _can_prepack(weight)
        dense = weight.detach().contiguous()
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(dense, TILE_ROWS) if self._is_prepacked else dense
        )

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        padded = nn.functional.pad(x, (0, 0, 0, -num_rows % TILE_ROWS)).contiguous()
        out = x.new_empty(padded.shape[0], self.shape[0])
        for start in range(0, num_rows, TILE_ROWS):
            # rows [start, start + TILE_ROWS) of padded and out
            out[start : start + TILE_ROWS] = self._multiply_tile(padded[start : start + TILE_ROWS], bias)
        return out[:num_rows]

    def _multiply_tile(self, tile: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_prepacked:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise(tile, self._weight, bias, "none", [], ""))
        return nn.functional.linear(tile, self._weight, bias)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def _can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN has a layout of its own for this weight: faster, and in float32 free of the thread count."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class WeightHandle:
    """Stands where a module's `weight` was: tells its shape, dtype and device, and multiplies in `F.linear`.

    It is no tensor. Model code that would read the numbers fails loudly instead of computing something else.
    """

    def __init__(self, packed: PackedWeight) -> None:
        self._packed = packed
        self.shape, self.dtype, self.device = packed.shape, packed.dtype, packed.device

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        if func is not nn.functional.linear:
            raise NotImplementedError(f"this model's weights are packed for F.linear; {func} cannot read them")
        return cls._linear(*args, **(kwargs or {}))

    @staticmethod
    def _linear(input: Tensor, weight: "WeightHandle", bias: Tensor | None = None) -> Tensor:
        return multiply_rows(weight._packed, input, bias)


def multiply_rows(packed: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N]."""
    num_out, num_in = packed.shape
    return packed.multiply(x.reshape(-1, num_in), bias).view(*x.shape[:-1], num_out)


class PackedLinear(nn.Module):
    """In place of nn.Linear and of transformers' Conv1D, whose weight is transposed."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = packed
        self.out_features, self.in_features = packed.shape
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    @property
    def weight(self) -> WeightHandle:
        return WeightHandle(self.packed)

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return multiply_rows(self.packed, x, cast("Tensor | None", self.bias))

    def extra_repr(self) -> str:
        kind = type(self.packed).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, packed={kind}"


@dataclass(frozen=True)
class LinearReport:
    """What `prepare_linears` did to a model."""

    num_linears: int  # modules swapped
    packed_bytes: int  # held by their weights now
    unconverted: tuple[str, ...]  # matrices left to torch: with any here, batch invariance is not guaranteed


def prepare_linears(model: nn.Module, kernels_available: bool) -> LinearReport:
    """Swaps the linear layers of `model` in place, one after the other, so that memory grows by one layer at most.

    A weight shared with an embedding is copied: the embedding keeps its rows, the linear layer gets panels.
    """
    swapped: dict[nn.Module, PackedLinear] = {}
    for parent, name, child in list(_children(model)):
        if child not in swapped:
            if not _is_linear(child):
                continue
            swapped[child] = _pack_module(child, kernels_available)
        setattr(parent, name, swapped[child])
        _release(child)
    return LinearReport(
        num_linears=len(swapped),
        packed_bytes=sum(linear.packed.nbytes for linear in swapped.values()),
        unconverted=tuple(_unconverted(model)),
    )


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _is_linear(module: nn.Module) -> bool:
    """A module that computes exactly F.linear: a subclass may have changed that, a hook may watch it."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _pack_module(module: nn.Module, kernels_available: bool) -> PackedLinear:
    weight, bias = cast(Tensor, module.weight).detach(), cast("Tensor | None", module.bias)
    return PackedLinear(pack_weight(weight.t() if isinstance(module, Conv1D) else weight, kernels_available), bias)


def _release(module: nn.Module) -> None:
    """Lets go of a swapped module's own weight, whoever still holds the module."""
    module._parameters.pop("weight", None)


def pack_weight(weight: Tensor, kernels_available: bool) -> PackedWeight:
    """weight [N, K], copied; through the C++ kernel where it is available and knows device and dtype."""
    if kernels_available and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16):
        return KernelWeight(weight)
    return FixedTileWeight(weight)


def _unconverted(model: nn.Module) -> Iterator[str]:
    """Parameters that may take part in a matrix product of torch's; embeddings are only looked up."""
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                yield f"{module_name}.{name}".lstrip(".")
