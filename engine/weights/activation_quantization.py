"""Activation quantization: rows become integers, whose dot products with quantized weights are exact in any order.

A row's numbers share a scale in groups of 256 along K: the largest of them becomes the largest integer, or minus that.
So integer units do the work, for one row and for many, and every batch has the same bits. Rows are rounded to 8 bits
after the Hadamard transform, which is applied to weights, too (`engine.weights.hadamard`). The head's rows are rounded
to 16 bits, untransformed.

Weights in the blocks of a GGUF file are stored, so nothing can be transformed: the rows that they multiply are rounded
to 8 bits, as they are, with a scale per 32 numbers.
"""

import torch
from torch import Tensor

__all__ = ["BLOCK_GROUP_SIZE", "LARGEST", "ROW_GROUP_SIZE", "round_rows"]

ROW_GROUP_SIZE = 256  # numbers along K with one scale
BLOCK_GROUP_SIZE = 32  # the same, for weights in blocks

# The largest integer, by the bits of a row. Integers of 16 bits reach the kernels as two signed halves of 8 bits.
LARGEST = {16: 127 * 256 + 127, 8: 127}


def round_rows(x: Tensor, largest: int, group_size: int = ROW_GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Rounds rows x [T, K] to integers [T, K] with scales [T, groups], all float32; the reference of the kernels."""
    num_in = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -num_in % group_size)).view(len(x), -1, group_size)
    ends = groups.abs().amax(dim=2)
    # A Python number divided by a tensor would be rounded twice.
    factors = torch.where(ends > largest * 1e-38, torch.full_like(ends, largest) / ends, 0)
    return (groups * factors[..., None]).round_().flatten(1)[:, :num_in], ends / largest
