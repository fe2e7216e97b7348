"""The Hadamard transform of rows in registers, with the bits of `engine.weights.hadamard` in float32.

A row's size is a multiple of 16. Its blocks come in descending sizes: those of 2 n numbers and more end at the last
multiple of 2 n. Behind its numbers a row is filled up with zeros, which stay zeros.
"""

import triton
import triton.language as tl

__all__ = ["inverse_transformed", "transformed", "undone"]


@triton.jit
def transformed(rows, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Transforms rows [T, PADDED] of `SIZE` numbers."""
    return _added_and_subtracted(rows * _signs(SIZE, PADDED), SIZE, PADDED)


@triton.jit
def inverse_transformed(rows, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Transforms rows such that products with transformed ones stay the same."""
    return transformed(rows, SIZE, PADDED) * _shares(SIZE, PADDED)


@triton.jit
def undone(rows, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Returns transformed rows to what they were, but for rounding."""
    return _added_and_subtracted(rows, SIZE, PADDED) * _signs(SIZE, PADDED) * _shares(SIZE, PADDED)


@triton.jit
def _block_sizes(SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Returns the size of each number's block, [1, PADDED]."""
    place = tl.arange(0, PADDED)[None, :]
    sizes = tl.full((1, PADDED), 16, tl.int32)
    for log2 in tl.static_range(5, 9):
        sizes = tl.where(place < SIZE - SIZE % (1 << log2), 1 << log2, sizes)
    return sizes


@triton.jit
def _shares(SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Returns one over the size of each number's block, a power of two, [1, PADDED]."""
    return tl.div_rn(1.0, _block_sizes(SIZE, PADDED).to(tl.float32))


@triton.jit
def _signs(SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Returns which numbers change their signs, by 1 and -1, [1, PADDED]."""
    place = tl.arange(0, PADDED)[None, :] & (_block_sizes(SIZE, PADDED) - 1)
    pairs = place & (place >> 1) & 0x55
    pairs ^= pairs >> 4
    pairs ^= pairs >> 2
    return 1.0 - 2.0 * (pairs & 1).to(tl.float32)


@triton.jit
def _added_and_subtracted(rows, SIZE: tl.constexpr, PADDED: tl.constexpr):
    place = tl.arange(0, PADDED)[None, :]
    for log2 in tl.static_range(8):
        if 2 << log2 <= SIZE:
            pairs = rows.reshape(rows.shape[0], PADDED >> (log2 + 1), 2, 1 << log2)
            first, second = tl.split(pairs.permute(0, 1, 3, 2))
            sums = tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(rows.shape[0], PADDED)
            rows = tl.where(place < SIZE - SIZE % (2 << log2), sums, rows)
    return rows
