"""The product of rows with a weight, batch invariant: a row's sums depend on that row and on the weight's shape alone.

The sum over K is cut into segments. Each is summed from zero in blocks of a fixed size, and the segments are added in
their order, in float32. A few rows leave most of a GPU idle, so there segments run in parallel; many rows run them one
after the other, with the same additions. The weight is the left side of a tile's product, so that a tile has 64 or 128
rows for the tensor cores however few rows of x there are, and all tiles use the same instruction. That this
instruction's sums along K do not depend on the tile's other sides is assumed; a GPU shows it
(`python -m benchmarks.cuda_products bits`), the interpreter cannot.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.cuda.integers import WORD_ROWS, numbers_of_words, part_scales, row_offsets

__all__ = [
    "DTYPES",
    "Coding",
    "Rows",
    "SumOrder",
    "Tile",
    "linear",
    "linear_in_segments",
    "sum_order",
    "tile_for",
    "tile_sum",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Number formats of weights and rows."""
_BUSY_TILES = 128
"""So many tiles at a time keep a large GPU busy, twice as many if they read codes. A constant, so that the order of
sums is the same on all GPUs."""
_STEP_BYTES = 128
"""Bytes of a row that one step of a tile multiplies: a line of the caches."""
_OTHER_SHARED_BYTES = 1 << 10  # of a program, beside its stages
_WARP_GROUP_SHARED_BYTES = 200 << 10  # where there is more, tensor cores read x from there, not from registers
_MAX_SEGMENTS = 8
_MIN_SEGMENT = 512  # numbers along K: shorter ones take longer to add than to sum
_WIDE = 6144  # weight rows that suffice for tiles of 128 each to keep a GPU reading
_WORD_ROWS = tl.constexpr(WORD_ROWS)
_SUM_COLUMNS = 256  # of a program that adds segments


class SumOrder(NamedTuple):
    """The order in which a product sums along K. Another order gives other bits."""

    block_k: int
    """Numbers that one step of a tile multiplies."""
    segment: int
    """Numbers of a segment, a multiple of `block_k`; the last segment may have fewer."""

    def num_segments(self, num_in: int) -> int:
        return -(-num_in // self.segment)


class Coding(NamedTuple):
    """What the codes of a weight [N, K] stand for.

    Of integers, a number is code * scale + minimum, rounded once to the number format of the rows that it multiplies
    (for float16, to float32 before). Codes in e4m3 are multiplied as they are, by rows in e4m3, and sums scaled by row
    and column.
    """

    scales: Tensor
    """Scales of e4m3 [1, N, 1] in float32, of integers [G / S, N, S] in int32, with S groups in a step: the bits of a
    scale, and in the lower half those of a minimum, both in bfloat16. So they are wide enough to be copied ahead."""
    bits: int = 0
    """Bits of an integer, 8 or 4; 0 for e4m3."""
    group_size: int = 0
    """Integers along K with one scale."""


class Tile(NamedTuple):
    """The part of a product that one program computes, and how. None of this changes bits."""

    block_n: int
    """Rows of the weight: 64 or 128."""
    block_t: int
    """Rows of x: a power of two, 16 at least."""
    num_warps: int
    num_stages: int
    has_parallel_segments: bool
    """Whether each segment has a program of its own, and a second kernel adds them; else a program runs them all."""


def sum_order(num_out: int, num_in: int, dtype: torch.dtype) -> SumOrder:
    """Returns the order of sums of a weight [N, K] of that shape: segments enough to keep a GPU busy with one row.

    `dtype` is that of the weight's numbers or, with 8 bits for integers of any size, of its codes.
    """
    block_k = _STEP_BYTES // dtype.itemsize
    wanted = (2 if dtype.itemsize == 1 else 1) * _BUSY_TILES // triton.cdiv(num_out, 64)
    num_segments = max(1, min(wanted, num_in // _MIN_SEGMENT, _MAX_SEGMENTS))
    return SumOrder(block_k, triton.cdiv(triton.cdiv(num_in, num_segments), 2 * block_k) * 2 * block_k)


def tile_for(
    num_rows: int,
    num_out: int,
    num_segments: int,
    dtype: torch.dtype,
    shared_bytes: int,
    coding: Coding | None = None,
    is_hopper: bool = False,
) -> Tile:
    """Returns the tile with which `num_rows` rows are multiplied on a GPU with so much shared memory a program, which
    may be of compute capability 9.0."""
    if dtype == torch.float32:  # by threads, without tensor cores
        shape = 64, 16 if num_rows <= 16 else 64, 4, 2
    elif coding is None:
        shape = _shape_for_numbers(num_rows, num_out, num_segments)
    elif coding.bits == 0:
        shape = _shape_for_e4m3(num_rows, num_out, shared_bytes)
    else:
        shape = _shape_for_integers(num_rows, num_out, coding.bits, shared_bytes, is_hopper)
    block_n, block_t, num_warps, num_stages = shape
    num_tiles = triton.cdiv(num_out, block_n) * triton.cdiv(num_rows, block_t)
    has_parallel_segments = num_segments > 1 and num_tiles <= _BUSY_TILES
    bits = 0 if coding is None else coding.bits
    stage_bytes = (block_n + block_t) * _STEP_BYTES
    if bits:  # of a step of as many numbers, with scales
        stage_bytes = block_n * (_STEP_BYTES * bits // 8 + 16) + block_t * _STEP_BYTES * dtype.itemsize
    stages_that_fit = (shared_bytes - _OTHER_SHARED_BYTES) // stage_bytes
    return Tile(block_n, block_t, num_warps, max(2, min(num_stages, stages_that_fit)), has_parallel_segments)


def _shape_for_numbers(num_rows: int, num_out: int, num_segments: int) -> tuple[int, int, int, int]:
    """Returns the sides of a tile, its warps and its stages."""
    if num_rows <= 16:
        return (128, 16, 8, 8) if num_out >= _WIDE else (64, 16, 4, 8)
    if num_rows <= 64:
        return 64, triton.next_power_of_2(num_rows), 4, 8
    if num_rows <= 128:
        return 64, 128, 4, 4
    return (128, 256, 8, 3) if num_segments == 1 else (128, 128, 8, 4)  # two sums of 128 x 256 do not fit


def _shape_for_e4m3(num_rows: int, num_out: int, shared_bytes: int) -> tuple[int, int, int, int]:
    if num_rows <= 16:
        return 128, 16, 8, 5
    if num_rows <= 64 or shared_bytes < _WARP_GROUP_SHARED_BYTES:
        is_wide = num_out >= 2 * _WIDE and num_rows > 32
        return (128, 64, 8, 4) if is_wide else (64, min(64, triton.next_power_of_2(num_rows)), 4, 8)
    return (64, 128, 4, 4) if num_rows <= 128 else (128, 128, 8, 4)


def _shape_for_integers(
    num_rows: int, num_out: int, bits: int, shared_bytes: int, is_hopper: bool
) -> tuple[int, int, int, int]:
    if num_rows <= 16:
        return (64, 16, 4, 4) if bits == 4 else (128, 16, 8, 4)
    if num_rows <= 64 or shared_bytes < _WARP_GROUP_SHARED_BYTES:
        is_wide = num_out >= 2 * _WIDE and num_rows > 32
        return (128, 64, 8, 3) if is_wide else (64, min(64, triton.next_power_of_2(num_rows)), 4, 3)
    if num_rows <= 128 or (bits == 4 and not is_hopper):  # for 10.0, Triton 3.7.1 makes larger ones empty kernels
        return 64, 128, 4, 3
    return 128, 128, 8, 2 if bits == 4 else 3


class Rows(NamedTuple):
    """The rows x [T, K] of a product."""

    numbers: Tensor
    """In a number format of `DTYPES`, or in e4m3. They lie at multiples of 16 bytes, numbers of a row side by side."""
    dtype: torch.dtype
    """Number format of the product."""
    scales: Tensor | None = None
    """[T], of rows in e4m3."""


def linear(
    x: Rows, weight: Tensor, bias: Tensor | None, order: SumOrder, tile: Tile, coding: Coding | None = None
) -> Tensor:
    """x [T, K] times weight [N, K], transposed, plus bias [N] -> [T, N], all of one number format, unless codes.

    K is a multiple of the order's block. Rows of the weight lie as those of x. The product with integers has the bits
    that their numbers give. Does not wait for the GPU.
    """
    product = linear_in_segments(x, weight, bias, order, tile, coding)
    return product if product.dim() == 2 else _added(product, bias, x.dtype)


def linear_in_segments(
    x: Rows, weight: Tensor, bias: Tensor | None, order: SumOrder, tile: Tile, coding: Coding | None = None
) -> Tensor:
    """The product as `linear` has it; of a tile with parallel segments, what is still to be added: segments in their
    order, [segments, T, N] in float32, and the bias."""
    (num_rows, num_in), num_out = x.numbers.shape, weight.shape[0] if coding is None else coding.scales.shape[-2]
    num_segments = order.num_segments(num_in)
    num_parallel = num_segments if tile.has_parallel_segments else 1
    is_split = num_parallel > 1
    shape, dtype = ((num_parallel, num_rows, num_out), torch.float32) if is_split else ((num_rows, num_out), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    if out.numel() == 0:
        return out
    num_tiles = triton.cdiv(num_rows, tile.block_t) * triton.cdiv(num_out, tile.block_n)
    _linear_kernel[(num_tiles, num_parallel)](
        x.numbers,
        weight,
        None if coding is None else coding.scales,
        x.scales,
        None if is_split else bias,
        out,
        num_rows,
        num_out,
        num_in,
        order.segment,
        x.numbers.stride(0),
        weight.stride(0),
        BLOCK_N=tile.block_n,
        BLOCK_T=tile.block_t,
        BLOCK_K=order.block_k,
        NUM_SEGMENTS=num_segments // num_parallel,
        GROUP=0 if coding is None else coding.group_size,
        BITS=0 if coding is None else coding.bits,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def _added(partials: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Adds partials [segments, T, N] in their order, and bias [N]; returns the sums [T, N]."""
    num_segments, num_rows, num_out = partials.shape
    y = torch.empty(num_rows, num_out, dtype=dtype, device=partials.device)
    if y.numel() == 0:
        return y
    _add_segments_kernel[(num_rows, triton.cdiv(num_out, _SUM_COLUMNS))](
        partials,
        bias,
        y,
        num_rows,
        num_out,
        NUM_SEGMENTS=num_segments,
        BLOCK_N=_SUM_COLUMNS,
        num_warps=2,
        enable_fp_fusion=False,
    )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, weight, scales, x_scales, bias,
    out,  # [T, N] of x's format, or [segments, T, N] in float32
    num_rows, num_out, num_in, segment, x_stride, weight_stride,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,  # that this program sums
    GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    tile_n, tile_t = _tile_of(tl.program_id(0), tl.cdiv(num_out, BLOCK_N), tl.cdiv(num_rows, BLOCK_T))
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    # Past the ends, the last row is read again and nothing is written.
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    weight_rows = weight + row_offsets(row, weight_stride, BLOCK_K, BITS)
    x_row = tl.minimum(t, num_rows - 1).to(tl.int64)
    scale_rows = None if scales is None else scales + row * (4 if BITS == 4 else 1)
    x_scale_rows = None if x_scales is None else x_scales + x_row
    start = tl.program_id(1) * segment
    total = tile_sum(
        weight_rows, x + x_row * x_stride, scale_rows, x_scale_rows, start, segment, num_in, num_out,
        NUM_SEGMENTS, BLOCK_N, BLOCK_T, BLOCK_K, GROUP, BITS,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
    out += tl.program_id(1).to(tl.int64) * num_rows * num_out
    pointers = out + t.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(t < num_rows)[None, :] & (n < num_out)[:, None])


@triton.jit
def _tile_of(program, tiles_n, tiles_t):
    """The place of a program's tile: programs that run at a time share rows of the weight and of x, in the L2 cache."""
    GROUP: tl.constexpr = 16  # tiles of x that take turns at the same rows of the weight
    in_group = GROUP * tiles_n
    first_t = program // in_group * GROUP
    group_size = tl.minimum(tiles_t - first_t, GROUP)
    return program % in_group // group_size, first_t + program % in_group % group_size


@triton.jit
def tile_sum(
    weight_rows,  # pointers [BLOCK_N], as all but those of x
    x_rows,  # pointers [BLOCK_T]
    scale_rows,  # None for a weight of numbers
    x_scale_rows,  # pointers [BLOCK_T]; None for rows of numbers
    start,
    segment,
    num_in,
    num_out,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """The products' sums [BLOCK_N, BLOCK_T] over so many segments of K, added in their order."""
    total = _segment_sum(
        weight_rows, x_rows, scale_rows, x_scale_rows, start, segment, num_in, num_out,
        BLOCK_N, BLOCK_T, BLOCK_K, GROUP, BITS,
    )  # fmt: skip
    for number in range(1, NUM_SEGMENTS):
        total += _segment_sum(
            weight_rows, x_rows, scale_rows, x_scale_rows, start + number * segment, segment, num_in,
            num_out, BLOCK_N, BLOCK_T, BLOCK_K, GROUP, BITS,
        )  # fmt: skip
    return total


@triton.jit
def _segment_sum(
    weight_rows,
    x_rows,
    scale_rows,
    x_scale_rows,
    start,
    segment,
    num_in,
    num_out,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
):
    """The products' sums [BLOCK_N, BLOCK_T] over one segment of K, block by block from zero."""
    PARTS: tl.constexpr = 16 // BITS if BITS else 1  # of a step's columns, which words have side by side
    PART: tl.constexpr = BLOCK_K // PARTS
    WORDS: tl.constexpr = PART // 2 if BITS else BLOCK_K
    STRIDE: tl.constexpr = _WORD_ROWS * WORDS if BITS else BLOCK_K
    weights = weight_rows[:, None] + start // BLOCK_K * STRIDE + tl.arange(0, WORDS)[None, :]
    columns = x_rows[None, :] + (start + tl.arange(0, PART))[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for at in range(start, tl.minimum(start + segment, num_in), BLOCK_K):
        codes = tl.load(weights)
        if BITS:
            scales = part_scales(scale_rows, at, num_out, BLOCK_N, BLOCK_K, GROUP)
            for part in tl.static_range(PARTS):
                x = tl.load(columns + part * PART)
                numbers = numbers_of_words(codes, part, scales[part], x.dtype, BLOCK_N, WORDS, BITS)
                total = tl.dot(numbers, x, total, input_precision="ieee")
        elif x_scale_rows is None:
            total = tl.dot(codes, tl.load(columns), total, input_precision="ieee")
        else:  # from zero: tensor cores drop bits of long sums in e4m3
            total += tl.dot(codes, tl.load(columns))
        weights += STRIDE
        columns += BLOCK_K
    if x_scale_rows is not None:
        total *= tl.load(scale_rows)[:, None] * tl.load(x_scale_rows)[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _add_segments_kernel(partials, bias, y, num_rows, num_out, NUM_SEGMENTS: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_inside = n < num_out
    total = tl.load(partials + row * num_out + n, mask=is_inside)
    for segment in tl.static_range(1, NUM_SEGMENTS):
        total += tl.load(partials + (segment * num_rows + row) * num_out + n, mask=is_inside)
    if bias is not None:
        total += tl.load(bias + n, mask=is_inside).to(tl.float32)
    tl.store(y + row * num_out + n, total.to(y.dtype.element_ty), mask=is_inside)
