"""Weights that stay in the blocks of GGUF files or of NVFP4: the kernels expand numbers while they multiply them.

`KernelWeight` of the numbers in float32 is the plain path: products are the same, bit for bit. Those of GGUF may be
multiplied by rows of integers instead, whose plain path is `rounded_product`.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.checkpoint.gguf.block_types import NUMBER_OF
from engine.checkpoint.gguf.blocks import BlockCodec, Blocks
from engine.checkpoint.published.codecs import NvFp4
from engine.checkpoint.stored_tensor import StoredRows, StoredTensor
from engine.weights.activation_quantization import BLOCK_GROUP_SIZE, LARGEST, round_rows
from engine.weights.packed_weight import KernelWeight, WeightHandle

__all__ = ["BlockEmbedding", "BlockWeight", "keep_blocks", "rounded_product"]

_NVFP4 = 256
"""Its number in the kernels; those of GGUF are smaller."""


class BlockWeight(KernelWeight):
    """A weight [N, K] in blocks, for rows of float32, which it may round; see `engine/kernels/blocks`."""

    def __init__(self, shape: torch.Size, packed: Tensor, rounds_rows: bool = False) -> None:
        self.shape, self.dtype, self.device = shape, torch.float32, packed.device
        self.packed, self.rounds_rows = packed, rounds_rows

    def rows(self, numbers: Tensor) -> Tensor:
        """Returns the weight's rows of these numbers [...] in float32: [..., K]."""
        taken = torch.ops.twostep.take_block_rows(self.packed, numbers.flatten())
        return cast(Tensor, taken).view(*numbers.shape, self.shape[1])


def keep_blocks(weight: Tensor, rounds_rows: bool = False) -> BlockWeight | None:
    """Packs a weight [N, K] as it is stored; None for one that has other numbers than those of blocks in float32, or
    columns of different types where a panel has one. With `rounds_rows`, it rounds rows if all its blocks are of GGUF.
    """
    if not isinstance(weight, StoredTensor) or weight.dtype is not torch.float32 or weight.is_transposed:
        return None
    found = [blocks for piece in weight.pieces if (blocks := _blocks_of(piece)) is not None]
    if len(found) < len(weight.pieces):
        return None
    kinds, rows = zip(*found, strict=True)
    rounds_rows = rounds_rows and _NVFP4 not in kinds
    packed: Tensor | None = torch.ops.twostep.pack_blocks(rows, kinds, rounds_rows)
    return None if packed is None else BlockWeight(weight.shape, packed, rounds_rows)


def _blocks_of(piece: StoredRows) -> tuple[int, Tensor] | None:
    """Returns the kind of blocks that the rows consist of, as the kernels number them, and their bytes; None if of
    none."""
    if isinstance(piece.codec, NvFp4):
        return _NVFP4, piece.codec.blocks(*piece.parts)
    if isinstance(piece.codec, BlockCodec) and not piece.codec.is_dense:
        return NUMBER_OF[piece.codec.kind], piece.parts[0]
    return None


def rounded_product(x: Tensor, blocks: Blocks) -> Tensor:
    """x [T, K] -> its product [T, N] with N rows of blocks, as the kernels compute it where rows are rounded: dot
    products of integers are exact, and then each operation is rounded to float32, one group after the other."""
    numbers, row_scales = round_rows(x, LARGEST[8], BLOCK_GROUP_SIZE)
    size = blocks.codes.shape[2]
    total = torch.zeros(len(x), len(blocks.codes))
    for group, rows in enumerate(torch.split(numbers.double(), size, dim=1)):
        share = (rows @ blocks.codes[:, group].double().T).float() * blocks.scales[:, group]
        if blocks.offsets is not None:
            share += blocks.offsets[:, group] * rows.sum(1, keepdim=True).float()
        total += share * row_scales[:, group * size // BLOCK_GROUP_SIZE, None]
    return total


class BlockEmbedding(WeightHandle):
    """Replaces an embedding's `weight`: its rows are expanded in `F.embedding`."""

    packed: BlockWeight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Tensor:
        if func is nn.functional.embedding:
            numbers, weight = args
            return cast(BlockEmbedding, weight).packed.rows(numbers)
        return super().__torch_function__(func, types, args, kwargs)
