"""The Hadamard transform of rows: numbers become sums and differences of many, so that none is much larger than others.

Rounding to few bits loses much where one number is far larger than the others of its group, and activations have such
outliers. Rows are transformed, and weights inversely: their product stays the same, but for rounding. Blocks have 256
numbers; the rest of K is padded with zeros to a multiple of 64, and has blocks of 128 and 64. Keys and values are
transformed in the KV cache, too (`engine.attention.kv_format`), in blocks down to 16, without zeros.

Before the transform some numbers change their signs, by a bent function of their position: so equal and alternating
numbers, whose sums would be large, are spread as evenly as possible, too.

This is the plain reference of the kernels (`engine/kernels/base/hadamard.h`), all in float32.
"""

import torch
from torch import Tensor

__all__ = ["LARGEST_BLOCK", "SMALLEST_HEAD_BLOCK", "inverse_transform", "transform", "undo"]

_BLOCKS = (256, 128, 64, 32, 16)
_SMALLEST_BLOCK = 64  # of weights
LARGEST_BLOCK, SMALLEST_HEAD_BLOCK = _BLOCKS[0], _BLOCKS[-1]


def transform(x: Tensor, smallest: int = _SMALLEST_BLOCK) -> Tensor:
    """Transforms rows x [T, K] -> [T, K rounded up to `smallest`]; squares of the numbers grow by their block's length.

    `smallest`, 64 or 16, is the length of the smallest block.
    """
    return torch.cat([_transformed(block) for block in _blocks(x, smallest)], dim=1)


def inverse_transform(weight: Tensor, smallest: int = _SMALLEST_BLOCK) -> Tensor:
    """Transforms a weight as `transform` does, such that products with transformed rows stay the same."""
    return torch.cat([_transformed(block) / block.shape[1] for block in _blocks(weight, smallest)], dim=1)


def undo(x: Tensor, smallest: int = _SMALLEST_BLOCK) -> Tensor:
    """Returns transformed rows x [T, K], K a multiple of `smallest`, to what they were, but for rounding."""
    blocks = [(_added_and_subtracted(block), block.shape[1]) for block in _blocks(x, smallest)]
    return torch.cat([block * _signs(block) / size for block, size in blocks], dim=1)


def _is_flipped(position: int) -> bool:
    return (position & position >> 1 & 0x55).bit_count() % 2 == 1


def _blocks(x: Tensor, smallest: int) -> list[Tensor]:
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % smallest))
    sizes, left = [], padded.shape[1]
    for size in _BLOCKS:
        sizes += [size] * (left // size)
        left %= size
    return list(torch.split(padded, sizes, dim=1))


def _transformed(block: Tensor) -> Tensor:  # [T, size]
    return _added_and_subtracted(block * _signs(block))


def _signs(block: Tensor) -> Tensor:
    signs = [-1.0 if _is_flipped(position) else 1.0 for position in range(block.shape[1])]
    return torch.tensor(signs, device=block.device)


def _added_and_subtracted(block: Tensor) -> Tensor:  # [T, size]
    distance = 1
    while distance < block.shape[1]:
        first, second = block.view(len(block), -1, 2, distance).unbind(2)
        block = torch.stack([first + second, first - second], dim=2).flatten(1)
        distance *= 2
    return block
