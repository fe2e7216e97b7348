"""The Hadamard transform along K: numbers become sums and differences of many, so that none is much larger than others.

Rounding to few bits loses much where one number is far larger than the others of its group, and activations have such
outliers. Rows are transformed, and weights inversely: their product stays the same, but for rounding. Blocks have 256
numbers; the rest of K is padded with zeros to a multiple of 64, and has blocks of 128 and 64.

Before the transform some numbers change their signs, by a bent function of their position: so equal and alternating
numbers, whose sums would be large, are spread as evenly as possible, too.

This is the plain reference of the kernels (`engine/kernels/quantized/hadamard.h`), all in float32.
"""

import torch
from torch import Tensor

__all__ = ["inverse_transform", "transform"]

_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 64


def transform(x: Tensor) -> Tensor:
    """Transforms rows x [T, K] -> [T, K rounded up to 64]; squares of the numbers grow by their block's length."""
    return torch.cat([_transformed(block) for block in _blocks(x)], dim=1)


def inverse_transform(weight: Tensor) -> Tensor:
    """Transforms a weight [N, K] -> [N, K rounded up to 64], such that products with transformed rows stay the same."""
    return torch.cat([_transformed(block) / block.shape[1] for block in _blocks(weight)], dim=1)


def _is_flipped(position: int) -> bool:
    return (position & position >> 1 & 0x55).bit_count() % 2 == 1


def _blocks(x: Tensor) -> list[Tensor]:
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % _SMALLEST_BLOCK))
    sizes, left = [], padded.shape[1]
    for size in (_LARGEST_BLOCK, 2 * _SMALLEST_BLOCK, _SMALLEST_BLOCK):
        sizes += [size] * (left // size)
        left %= size
    return list(torch.split(padded, sizes, dim=1))


def _transformed(block: Tensor) -> Tensor:  # [T, size]
    block = block * torch.tensor([-1.0 if _is_flipped(position) else 1.0 for position in range(block.shape[1])])
    distance = 1
    while distance < block.shape[1]:
        first, second = block.view(len(block), -1, 2, distance).unbind(2)
        block = torch.stack([first + second, first - second], dim=2).flatten(1)
        distance *= 2
    return block
