"""How the numbers of a key or a value lie in the KV cache, told by the type of the cache: plain, or of 8 or 4 bits.

A quantized key or value is transformed first (Hadamard, `engine.weights.hadamard`), so that no number is much larger
than the others, and then rounded to integer levels with one scale for each group of 32 numbers; the last group may have
16. It is a row of bytes: levels first, then a scale in bfloat16 for each group. With 4 bits a byte has two levels, both
plus 8: in its low half one of the group's first half, in its high half the one as far into the second half. So what is
stored of a token depends on that token's key and value alone, and lies in its block.

A group's scale makes the number farthest from zero about the largest level. Of four such scales the one with the least
square error is taken, the first of equal ones; so a group loses less than in llama.cpp's Q8_0 and Q4_0, which have
scales of as many bits.

This is the plain reference of the kernels (`engine/kernels/attention/quantized_rows.h`): the same bytes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.weights import hadamard

__all__ = [
    "KV_DTYPES",
    "MULTIPLE",
    "dequantize",
    "is_quantized",
    "num_bits",
    "num_numbers",
    "quantize",
    "row_size",
    "shares_rows",
    "transform_queries",
    "undo_transform",
]

KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
"""Type of the cache by the name of its format."""

MULTIPLE = hadamard.SMALLEST_HEAD_BLOCK
"""Quantized keys and values have a multiple of so many numbers."""
GROUP = 32
_BITS = {torch.int8: 8, torch.uint8: 4}
_SCALE_BYTES = 2
_SMALLEST_SCALE = 2.0**-100  # the inverse of a smaller one would leave the range of float32
_LARGEST_IN_QUERIES = 32767.0
_FARTHEST_LEVELS = {8: (-128.0, -127.0, -126.0, -125.0), 4: (-8.0, -7.5, -8.5, -9.0)}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this type has levels and scales."""
    return dtype in _BITS


def num_bits(dtype: torch.dtype) -> int:
    """Returns how many bits a level has in a cache of this type; 0 if it has none."""
    return _BITS.get(dtype, 0)


def row_size(head_size: int, dtype: torch.dtype) -> int:
    """Returns how many elements of the cache a key or a value of `head_size` numbers takes."""
    return head_size if dtype not in _BITS else head_size * _BITS[dtype] // 8 + _SCALE_BYTES * -(-head_size // GROUP)


def shares_rows(num_first: int, num_others: int) -> bool:
    """Whether the first numbers of a quantized row lie in it as in a row of their own: they are transformed, and
    rounded, without the others."""
    return num_first % hadamard.LARGEST_BLOCK == 0 and num_others % MULTIPLE == 0


def num_numbers(size: int, dtype: torch.dtype) -> int:
    """Returns how many numbers a key or a value has whose row has `size` elements: the inverse of `row_size`."""
    if dtype not in _BITS:
        return size
    whole = row_size(GROUP, dtype)
    return size // whole * GROUP + (GROUP // 2 if size % whole else 0)


def quantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns keys or values x [..., head size] as rows [..., row size] of a quantized cache's type.

    A group with a number that is not finite after the transform has the scale NaN.
    """
    size = x.shape[-1]
    numbers = hadamard.transform(x.reshape(-1, size), MULTIPLE)
    groups = functional.pad(numbers, (0, -size % GROUP)).view(-1, -(-size // GROUP), GROUP)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    scales, levels = _rounded(groups.masked_fill(~is_finite, 0.0), _BITS[dtype])
    scales = scales.masked_fill(~is_finite, torch.nan)[..., 0]
    upper_halves = (scales.contiguous().view(torch.int32) >> 16).to(torch.int16)
    parts = [_level_bytes(levels.flatten(1)[:, :size], _BITS[dtype]), upper_halves.view(torch.uint8)]
    return torch.cat(parts, dim=1).view(dtype).view(*x.shape[:-1], -1)


def dequantize(rows: Tensor) -> Tensor:
    """Returns the transformed numbers [..., head size] in float32 of rows [..., row size] of a quantized cache."""
    bits, size = _BITS[rows.dtype], num_numbers(rows.shape[-1], rows.dtype)
    data = rows.contiguous().view(torch.uint8).view(-1, rows.shape[-1])
    level_bytes = size * bits // 8
    scales = data[:, level_bytes:].contiguous().view(torch.bfloat16).float()
    levels = _levels_of(data[:, :level_bytes], bits)
    return (levels * scales.repeat_interleave(GROUP, dim=1)[:, :size]).view(*rows.shape[:-1], size)


def transform_queries(query: Tensor) -> Tensor:
    """Returns queries [..., head size] in float32, such that products with transformed keys stay the same.

    They are rounded to 16 bits, with a scale each: so kernels multiply integers. Those for AMX round them to bfloat16.
    """
    numbers = hadamard.inverse_transform(query.reshape(-1, query.shape[-1]), MULTIPLE).view(query.shape)
    largest = numbers.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, _LARGEST_IN_QUERIES) / largest  # a quotient of a number is a product in torch
    inverse = torch.where(largest > _SMALLEST_SCALE, inverse, 0.0)
    return (numbers * inverse).round() * (largest / _LARGEST_IN_QUERIES)


def undo_transform(values: Tensor) -> Tensor:
    """Returns sums of transformed values [..., head size] to what sums of the values are."""
    return hadamard.undo(values.reshape(-1, values.shape[-1]), MULTIPLE).view(values.shape)


def _rounded(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the scales [T, groups, 1] and levels [T, groups, GROUP] of finite numbers, both in float32."""
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    farthest = torch.where(high > -low, high, low)
    tried = []
    for level in _FARTHEST_LEVELS[bits]:
        scales = _bfloat16(farthest * (1 / groups.new_tensor(level)))
        levels = _to_levels(groups, scales, bits)
        tried.append((scales, levels, _square_error(levels * scales - groups)))
    best_scales, best_levels, best_errors = tried[0]
    for scales, levels, errors in tried[1:]:
        is_better = errors < best_errors
        best_scales = torch.where(is_better, scales, best_scales)
        best_levels = torch.where(is_better, levels, best_levels)
        best_errors = torch.where(is_better, errors, best_errors)
    return best_scales, best_levels


def _to_levels(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (groups * inverse).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1)


def _square_error(differences: Tensor) -> Tensor:
    """Returns the sums of squares of each group, added as a tree of halves."""
    squares = differences * differences
    while squares.shape[-1] > 1:
        first, second = squares.chunk(2, dim=-1)
        squares = first + second
    return squares


def _bfloat16(x: Tensor) -> Tensor:
    """Rounds to the nearest bfloat16, ties to even, and what is tiny to zero."""
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF).view(torch.float32)
    return torch.where(rounded.abs() < _SMALLEST_SCALE, 0.0, rounded)


def _level_bytes(levels: Tensor, bits: int) -> Tensor:
    """Returns levels [T, size] as bytes [T, size * bits / 8]."""
    integers = levels.to(torch.int8).view(torch.uint8)
    if bits == 8:
        return integers
    halves = [group.chunk(2, dim=1) for group in torch.split(integers + 8, GROUP, dim=1)]
    return torch.cat([low | high << 4 for low, high in halves], dim=1)


def _levels_of(data: Tensor, bits: int) -> Tensor:
    """Returns the levels [T, size] in float32 of bytes: the inverse of `_level_bytes`."""
    if bits == 8:
        return data.view(torch.int8).float()
    groups = torch.split(data, GROUP // 2, dim=1)
    return torch.cat([half.float() - 8 for group in groups for half in (group & 15, group >> 4)], dim=1)
