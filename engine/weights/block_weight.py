"""Weights that stay in the blocks of GGUF files or of NVFP4: the kernels expand numbers while they multiply them.

`KernelWeight` of the numbers in float32 is the plain path: products are the same, bit for bit.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.checkpoint.gguf.block_types import NUMBER_OF
from engine.checkpoint.gguf.blocks import BlockCodec
from engine.checkpoint.published.codecs import NvFp4
from engine.checkpoint.stored_tensor import StoredRows, StoredTensor
from engine.weights.packed_weight import KernelWeight, WeightHandle

__all__ = ["BlockEmbedding", "BlockWeight", "keep_blocks"]

_NVFP4 = 256
"""Its number in the kernels; those of GGUF are smaller."""


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
    found = [blocks for piece in weight.pieces if (blocks := _blocks_of(piece)) is not None]
    if len(found) < len(weight.pieces):
        return None
    kinds, rows = zip(*found, strict=True)
    packed: Tensor | None = torch.ops.twostep.pack_blocks(rows, kinds)
    return None if packed is None else BlockWeight(weight.shape, packed)


def _blocks_of(piece: StoredRows) -> tuple[int, Tensor] | None:
    """Returns the kind of blocks that the rows consist of, as the kernels number them, and their bytes; None if of
    none."""
    if isinstance(piece.codec, NvFp4):
        return _NVFP4, piece.codec.blocks(*piece.parts)
    if isinstance(piece.codec, BlockCodec) and not piece.codec.is_dense:
        return NUMBER_OF[piece.codec.kind], piece.parts[0]
    return None


class BlockEmbedding(WeightHandle):
    """Replaces an embedding's `weight`: its rows are expanded in `F.embedding`."""

    packed: BlockWeight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Tensor:
        if func is nn.functional.embedding:
            numbers, weight = args
            return cast(BlockEmbedding, weight).packed.rows(numbers)
        return super().__torch_function__(func, types, args, kwargs)
