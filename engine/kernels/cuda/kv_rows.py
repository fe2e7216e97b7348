"""Keys and values of 8 and 4 bits in Triton: rows of levels and scales, the bytes of `engine.attention.kv_format`.

`BITS` is 8 or 4, `SIZE` how many numbers a row has, `PADDED` a power of two from 32 on that they are filled up to.
Groups have 32 numbers. Of a longer row, `SIZE` may be the first ones: scales lie behind all `LEVELS` of that row.
"""

import triton
import triton.language as tl

from engine.kernels.cuda.hadamard import transformed

__all__ = ["load_numbers", "store_numbers"]

_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-100)
_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # added to a small number and taken away again, it rounds that
_INVERSES_OF_8_BITS: tl.constexpr = tl.constexpr((1 / -128, 1 / -127, 1 / -126, 1 / -125))
_INVERSES_OF_4_BITS: tl.constexpr = tl.constexpr((1 / -8, 1 / -7.5, 1 / -8.5, 1 / -9))


@triton.jit
def load_numbers(
    rows, mask, SIZE: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Loads the transformed numbers [T, PADDED] in float32 of the rows at these pointers [T] to bytes, whose addresses
    are multiples of `ALIGNED`; zeros in place of rows that the mask leaves out."""
    row = tl.multiple_of(rows[:, None], (ALIGNED, ALIGNED))
    place, group = tl.arange(0, PADDED), tl.arange(0, PADDED // 32)
    is_number = mask[:, None] & (place[None, :] < SIZE)
    if BITS == 8:
        levels = tl.load(row + place[None, :], mask=is_number, other=0).to(tl.float32)
    else:
        half = _halves(place, SIZE)
        at = place // 32 * 16 + place % half
        pairs = tl.load(row + at[None, :], mask=is_number, other=0).to(tl.int32)
        levels = (pairs >> (place % 32 // half * 4)[None, :] & 15).to(tl.float32) - 8.0
    scale_at = (row + LEVELS * BITS // 8).to(tl.pointer_type(tl.bfloat16), bitcast=True) + group[None, :]
    has_scale = mask[:, None] & (group[None, :] < tl.cdiv(SIZE, 32))
    scales = tl.load(scale_at, mask=has_scale, other=0.0).to(tl.float32)
    numbers = levels.reshape(rows.shape[0], PADDED // 32, 32) * scales[:, :, None]
    return numbers.reshape(rows.shape[0], PADDED)


@triton.jit
def _halves(place, SIZE: tl.constexpr):
    """Returns how many numbers of 4 bits lie in the lower halves of a group's bytes: half of them."""
    return 16 if SIZE % 32 == 0 else tl.where(place < SIZE // 32 * 32, 16, 8)


@triton.jit
def store_numbers(row, numbers, SIZE: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr):
    """Stores a key or a value [1, PADDED] in the row at this pointer to bytes."""
    group = tl.arange(0, PADDED // 32)
    groups = transformed(numbers, SIZE, PADDED).reshape(PADDED // 32, 32)
    is_finite = tl.max((groups - groups != 0.0).to(tl.int32), 1) == 0
    scales, levels = _rounded(tl.where(is_finite[:, None], groups, 0.0), BITS)
    scale_bits = tl.where(is_finite, scales.to(tl.int32, bitcast=True), 0x7FC00000) >> 16
    scale_at = (row + SIZE * BITS // 8).to(tl.pointer_type(tl.int16), bitcast=True) + group
    tl.store(scale_at, scale_bits.to(tl.int16), mask=group < tl.cdiv(SIZE, 32))
    if BITS == 8:
        at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(row + at, levels.to(row.dtype.element_ty), mask=at < SIZE)
    else:
        _store_pairs(row, levels + 8, SIZE, PADDED)


@triton.jit
def _store_pairs(row, levels, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Stores levels [groups, 32] from 0 to 15, two in a byte."""
    group = tl.arange(0, PADDED // 32)[:, None]
    even, odd = tl.split(levels.reshape(PADDED // 32, 2, 2, 8).permute(0, 3, 1, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    is_whole = group < SIZE // 32
    low = first | tl.where(is_whole, third, second) << 4
    at = row + group * 16 + tl.arange(0, 8)[None, :]
    tl.store(at, low.to(row.dtype.element_ty), mask=group < tl.cdiv(SIZE, 32))
    tl.store(at + 8, (second | fourth << 4).to(row.dtype.element_ty), mask=is_whole)


@triton.jit
def _rounded(groups, BITS: tl.constexpr):
    """Returns the scales [groups] and levels [groups, 32] of finite numbers: of four scales the one that errs least,
    the first of equal ones."""
    INVERSES: tl.constexpr = _INVERSES_OF_8_BITS if BITS == 8 else _INVERSES_OF_4_BITS
    high, low = tl.max(groups, 1), tl.min(groups, 1)
    farthest = tl.where(high > -low, high, low)
    best_scales, best_levels, least = _tried(groups, farthest * INVERSES[0], BITS)
    for at in tl.static_range(1, 4):
        scales, levels, errors = _tried(groups, farthest * INVERSES[at], BITS)
        is_better = errors < least
        best_scales, least = tl.where(is_better, scales, best_scales), tl.where(is_better, errors, least)
        best_levels = tl.where(is_better[:, None], levels, best_levels)
    return best_scales, best_levels.to(tl.int32)


@triton.jit
def _tried(groups, scales, BITS: tl.constexpr):
    """Returns these scales as they are stored, the levels that go with them, and the square errors."""
    scales = _to_bfloat16(scales)
    inverse = tl.where(scales == 0.0, 0.0, tl.div_rn(1.0, tl.where(scales == 0.0, 1.0, scales)))
    levels = groups * inverse[:, None] + _TO_INTEGER - _TO_INTEGER
    levels = tl.minimum(tl.maximum(levels, -1.0 * (1 << (BITS - 1))), 1.0 * ((1 << (BITS - 1)) - 1))
    errors = levels * scales[:, None] - groups
    squares = errors * errors
    for log2 in tl.static_range(5):
        first, second = tl.split(squares.reshape(groups.shape[0], 2, 16 >> log2).permute(0, 2, 1))
        squares = first + second
    return scales, levels, squares.reshape(groups.shape[0])


@triton.jit
def _to_bfloat16(x):
    """Rounds to the nearest bfloat16, ties to even, and what is tiny to zero."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(rounded) < _SMALLEST_SCALE, 0.0, rounded)
