"""Products of rows with the experts that each row chose, without waiting for the GPU to learn what they chose.

Slot s of row t is number t * S + s. Slots are sorted by expert, so that an expert's rows make whole tiles; how many
tiles each expert has is found by every program for itself. A tile sums as `engine.kernels.cuda.linear` does.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.cuda.integers import row_offsets
from engine.kernels.cuda.linear import Coding, Rows, SumOrder, tile_sum

__all__ = ["Experts", "SortedSlots", "add_slots", "multiply_by_experts", "sort_slots"]

_SCANNED = 1024  # slots at a time


class Experts(NamedTuple):
    """One matrix of each expert, all of one shape, and their biases."""

    addresses: Tensor  # [E] in int64, of weights [N, K]
    biases: Tensor | None  # [E, N]
    num_out: int
    num_in: int
    stride: int
    """Numbers from a weight's row to the next."""
    order: SumOrder
    number_type: torch.dtype
    """Number format of weights, or of their codes."""
    coding: Coding | None
    """What codes stand for, if weights are codes: all scales are [E, G / S, N, S]."""


class SortedSlots(NamedTuple):
    """The slots of rows, sorted by expert and then by number."""

    slots: Tensor  # [T * S] in int32
    ends: Tensor  # [E] in int32: where in `slots` each expert's end
    num_rows: int  # T


def sort_slots(chosen: Tensor, num_experts: int) -> SortedSlots:
    """Sorts the slots of the experts that rows chose, [T, S]. What is not the number of an expert is left out."""
    slots = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    if chosen.numel():
        _sort_slots_kernel[(num_experts,)](chosen.contiguous(), slots, ends, chosen.numel(), BLOCK=_SCANNED)
    return SortedSlots(slots, ends, chosen.shape[0])


def multiply_by_experts(x: Rows, experts: Experts, by_expert: SortedSlots, is_sorted: bool) -> Tensor:
    """Multiplies the rows that experts were chosen for by those experts' weights, and adds their biases.

    Takes rows x [T, K] and returns [T * S, N] in the sorted order; or, if x `is_sorted`, takes [T * S, K] in that order
    and returns [T * S, N] by the number of slot. What belongs to no expert is not written. Does not wait for the GPU.
    """
    num_slots, num_experts = by_expert.slots.shape[0], by_expert.ends.shape[0]
    y = torch.empty(num_slots, experts.num_out, dtype=x.dtype, device=x.numbers.device)
    if y.numel() == 0:
        return y
    coding = experts.coding
    block_n, block_t, num_warps, num_stages = _tile_for(num_slots / num_experts, x.dtype, coding is not None)
    most_tiles = min(num_slots, num_experts + num_slots // block_t)
    _multiply_by_experts_kernel[(triton.cdiv(experts.num_out, block_n), most_tiles)](
        x.numbers,
        experts.addresses,
        x.numbers.new_empty(0, dtype=experts.number_type),
        None if coding is None else coding.scales,
        x.scales,
        experts.biases,
        y,
        by_expert.slots,
        by_expert.ends,
        num_slots // by_expert.num_rows,
        num_experts,
        experts.num_out,
        experts.num_in,
        experts.order.segment,
        x.numbers.stride(0),
        experts.stride,
        0 if coding is None else coding.scales.shape[1] * coding.scales.shape[3],
        IS_SORTED=is_sorted,
        EXPERTS=triton.next_power_of_2(num_experts),
        NUM_SEGMENTS=experts.order.num_segments(experts.num_in),
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        BLOCK_K=experts.order.block_k,
        GROUP=0 if coding is None else coding.group_size,
        BITS=0 if coding is None else coding.bits,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
    )
    return y


def add_slots(outputs: Tensor, chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Adds what a row's experts give, times their weights, in the order of its slots, in float32.

    Takes outputs [T * S, H] by the number of slot, the experts chosen and their weights [T, S]; returns [T, H].
    Products have the number format that torch's have. What is not the number of an expert adds zero.
    """
    (num_rows, num_slots), size = chosen.shape, outputs.shape[1]
    y = outputs.new_empty(num_rows, size)
    if y.numel():
        _add_slots_kernel[(num_rows, triton.cdiv(size, 256))](
            outputs,
            chosen.contiguous(),
            weights.contiguous(),
            y,
            num_experts,
            size,
            NUM_SLOTS=num_slots,
            IS_ROUNDED=torch.result_type(outputs, weights) == outputs.dtype,
            BLOCK=256,
            num_warps=2,
            enable_fp_fusion=False,
        )
    return y


def _tile_for(mean_rows: float, dtype: torch.dtype, are_codes: bool) -> tuple[int, int, int, int]:
    """Returns a tile's rows of a weight and of x, its warps and its stages, for so many rows an expert."""
    if mean_rows <= 16:
        return 64, 16, 4, 2 if dtype == torch.float32 else 4
    if mean_rows <= 64 or dtype == torch.float32 or are_codes:
        return 64, 64, 4, 2 if dtype == torch.float32 else 3 if are_codes else 4
    return 128, 128, 8, 3


@triton.jit(do_not_specialize=["num_slots"])
def _sort_slots_kernel(chosen, slots, ends, num_slots, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    num_before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        others = tl.load(chosen + slot, mask=slot < num_slots, other=-1)
        num_before += ((others >= 0) & (others < expert)).to(tl.int32)
    end = tl.sum(num_before)
    for first in range(0, num_slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        is_own = (tl.load(chosen + slot, mask=slot < num_slots, other=-1) == expert).to(tl.int32)
        tl.store(slots + end + tl.cumsum(is_own) - 1, slot, mask=is_own == 1)
        end += tl.sum(is_own)
    tl.store(ends + expert, end)


@triton.jit(do_not_specialize=["slots_of_row"])
def _multiply_by_experts_kernel(
    x, addresses,
    numbers,  # none, of the type that weights have
    scales, x_scales, biases, y, slots, ends, slots_of_row, num_experts, num_out, num_in, segment,
    x_stride, weight_stride, num_groups,
    IS_SORTED: tl.constexpr, EXPERTS: tl.constexpr, NUM_SEGMENTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    expert, first, end = _rows_of_tile(tl.program_id(1), ends, num_experts, EXPERTS, BLOCK_T)
    if expert >= num_experts:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = first + tl.arange(0, BLOCK_T)
    # Past the ends, the last row is read again and nothing is written.
    slot = tl.load(slots + tl.minimum(place, end - 1))
    rows = tl.minimum(place, end - 1) if IS_SORTED else slot // slots_of_row
    weight = tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(numbers.dtype.element_ty)), 16)
    row = tl.minimum(n, num_out - 1).to(tl.int64)
    scale_at = expert.to(tl.int64) * num_groups * num_out + row * (4 if BITS == 4 else 1)
    x_rows = x + rows.to(tl.int64) * x_stride
    weight_rows = weight + row_offsets(row, weight_stride, BLOCK_K, BITS)
    scale_rows = None if scales is None else scales + scale_at
    x_scale_rows = None if x_scales is None else x_scales + rows
    total = tile_sum(
        weight_rows, x_rows, scale_rows, x_scale_rows, 0, segment, num_in, num_out,
        NUM_SEGMENTS, BLOCK_N, BLOCK_T, BLOCK_K, GROUP, BITS,
    )  # fmt: skip
    if biases is not None:
        bias = tl.load(biases + expert.to(tl.int64) * num_out + n, mask=n < num_out, other=0.0)
        total += bias.to(tl.float32)[:, None]
    written = slot if IS_SORTED else place
    pointers = y + written.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(pointers, total.to(y.dtype.element_ty), mask=(place < end)[None, :] & (n < num_out)[:, None])


@triton.jit
def _rows_of_tile(tile, ends, num_experts, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The expert of a tile, its first row in the sorted order, and where the expert's rows end.

    Tiles are numbered expert by expert; one past the last has an expert past the last.
    """
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    own_ends = tl.load(ends + experts, mask=is_expert, other=0)
    own_starts = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    num_tiles = tl.where(is_expert, tl.cdiv(own_ends - own_starts, BLOCK_T), 0)
    tile_ends = tl.cumsum(num_tiles)
    expert = tl.sum((is_expert & (tile_ends <= tile)).to(tl.int32))
    is_own = experts == expert
    start = tl.sum(tl.where(is_own, own_starts + (tile - tile_ends + num_tiles) * BLOCK_T, 0))
    return expert, start, tl.sum(tl.where(is_own, own_ends, 0))


@triton.jit
def _add_slots_kernel(
    outputs,
    chosen,
    weights,
    y,
    num_experts,
    size,
    NUM_SLOTS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,  # whether products have the format of outputs
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * NUM_SLOTS
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        expert = tl.load(chosen + first + slot)
        is_written = (n < size) & (expert >= 0) & (expert < num_experts)
        output = tl.load(outputs + (first + slot) * size + n, mask=is_written, other=0.0).to(tl.float32)
        product = output * tl.load(weights + first + slot).to(tl.float32)
        if IS_ROUNDED:
            product = product.to(outputs.dtype.element_ty).to(tl.float32)
        total = product if slot == 0 else total + product
    tl.store(y + tl.program_id(0).to(tl.int64) * size + n, total.to(y.dtype.element_ty), mask=n < size)
