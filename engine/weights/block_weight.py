"""Weights that stay in the blocks of a GGUF file: the kernels expand their numbers while they multiply them.

`KernelWeight` of the numbers in float32 is the plain path: products are the same, bit for bit.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.checkpoint.gguf.block_types import BLOCK_TYPES
from engine.checkpoint.gguf.blocks import BlockCodec
from engine.checkpoint.stored_tensor import StoredTensor
from engine.weights.packed_weight import KernelWeight, WeightHandle

__all__ = ["BlockEmbedding", "BlockWeight", "keep_blocks"]

_NUMBERS = {kind: number for number, kind in BLOCK_TYPES.items()}


class BlockWeight(KernelWeight):
    """A weight [N, K] in blocks, for rows of float32; see `engine/kernels/blocks`."""

    def __init__(self, shape: torch.Size, packed: Tensor) -> None:
        self.shape, self.dtype, self.device = shape, torch.float32, packed.device
        self.packed = packed

    def rows(self, numbers: Tensor) -> Tensor:
        """Returns the weight's rows of these numbers [...] in float32: [..., K]."""
        taken = torch.ops.twostep.take_block_rows(self.packed, numbers.flatten())
        return cast(Tensor, taken).view(*numbers.shape, self.shape[1])


def keep_blocks(weight: Tensor) -> BlockWeight | None:
    """Packs a weight [N, K] as it is stored; None for one that has other numbers than those of blocks in float32, or
    columns of different types where a panel has one."""
    if not isinstance(weight, StoredTensor) or weight.dtype is not torch.float32 or weight.is_transposed:
        return None
    codecs = [piece.codec for piece in weight.pieces]
    kinds = [_NUMBERS[codec.kind] for codec in codecs if isinstance(codec, BlockCodec) and not codec.is_dense]
    if len(kinds) < len(codecs):
        return None
    rows = [part for piece in weight.pieces for part in piece.parts]
    packed: Tensor | None = torch.ops.twostep.pack_blocks(rows, kinds)
    return None if packed is None else BlockWeight(weight.shape, packed)


class BlockEmbedding(WeightHandle):
    """Replaces an embedding's `weight`: its rows are expanded in `F.embedding`."""

    packed: BlockWeight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Tensor:
        if func is nn.functional.embedding:
            numbers, weight = args
            return cast(BlockEmbedding, weight).packed.rows(numbers)
        return super().__torch_function__(func, types, args, kwargs)
