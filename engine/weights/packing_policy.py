"""Chooses how the weights of a model are packed: layers and head quantized as configured, routers dense."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.weights.affine_quantization import BITS
from engine.weights.block_weight import keep_blocks
from engine.weights.packed_weight import PackedWeight, pack_weight
from engine.weights.quantized_weight import KernelQuantizedWeight, TorchQuantizedWeight

__all__ = ["Pack", "Packing", "check_quantization", "packing_for"]

_E4M3_CAPABILITY = (8, 9)  # the first whose instructions know the format


class Pack(Protocol):
    """Packs weights."""

    def __call__(self, weight: Tensor, *, num_columns: int | None = None) -> PackedWeight:
        """Packs a weight [N, K], which is not kept. It is one rank's part of a matrix, if that has `num_columns` rows,
        by which the order of sums may be chosen."""
        ...


@dataclass(frozen=True, slots=True)
class Packing:
    """How each kind of weight is packed."""

    layers: Pack
    """Packs the weights of linear layers and experts."""
    head: Pack
    """Packs the language-model head: quantized to 8 bits for rows of 16, since its errors reach logits undiluted."""
    routers: Pack
    """Packs the weights of routers, never quantized: they are small, and a wrong choice of experts costs much. So it
    packs those of latent heads, whose errors reach all scores."""


def packing_for(
    quantization: str, kernels_available: bool, is_on_gpu: bool = False, rounds_rows: bool = False
) -> Packing:
    """Returns how to pack each kind of weight; `quantization` is none, fp8 on a GPU, or a name in `BITS`. Without one,
    weights in the blocks of GGUF may round the rows that they multiply."""
    dense = functools.partial(_pack, kernels_available=kernels_available)
    if quantization == "none":
        stored = functools.partial(dense, rounds_rows=rounds_rows)
        return Packing(layers=stored, head=stored, routers=dense)
    if is_on_gpu:
        from engine.weights.triton_quantized_weight import triton_quantized  # CPU builds of torch bring no Triton

        return Packing(
            layers=functools.partial(triton_quantized, quantization=quantization),
            head=functools.partial(triton_quantized, quantization="int8"),
            routers=dense,
        )
    bits = BITS[quantization]
    if not kernels_available:
        layers, head = (_of_any_part(functools.partial(TorchQuantizedWeight, bits=each)) for each in (bits, 8))
        return Packing(layers=layers, head=head, routers=dense)
    return Packing(
        layers=_of_any_part(functools.partial(KernelQuantizedWeight, bits=bits)),
        head=_of_any_part(functools.partial(KernelQuantizedWeight, bits=8, row_bits=16)),
        routers=dense,
    )


def _of_any_part(pack: Callable[[Tensor], PackedWeight]) -> Pack:
    """Returns what packs weights whose sums have an order that does not depend on their number of rows."""
    return lambda weight, *, num_columns=None: pack(weight)


def check_quantization(quantization: str, device: torch.device) -> None:
    """Raises ConfigError for a GPU that cannot multiply weights in this format."""
    if quantization != "fp8" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _E4M3_CAPABILITY:
        raise ConfigError(
            "--quantization fp8 needs a GPU of compute capability 8.9 or later, and this one has "
            f"{capability[0]}.{capability[1]}; use int8."
        )


def _pack(
    weight: Tensor, kernels_available: bool, rounds_rows: bool = False, num_columns: int | None = None
) -> PackedWeight:
    """Packs a weight as it is stored if the kernels multiply that, else its numbers."""
    stored = keep_blocks(weight, rounds_rows) if kernels_available else None
    return stored or pack_weight(weight, kernels_available, num_columns)
