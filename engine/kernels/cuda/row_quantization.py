"""Rows in e4m3, each with a scale of its own, by which its largest number is the format's largest."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.cuda.linear import Rows

__all__ = ["LARGEST_E4M3", "quantized_rows"]

LARGEST_E4M3 = 448.0


def quantized_rows(x: Tensor, size: int) -> Rows:
    """Rounds rows x [T, K] to e4m3 and fills them up to `size` columns with zeros. Does not wait for the GPU."""
    rows = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(len(rows), size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    if len(rows):
        block = triton.next_power_of_2(size)
        _quantize_rows_kernel[(len(rows),)](
            rows, codes, scales, rows.stride(0),
            SIZE=rows.shape[1], PADDED=size, LARGEST=LARGEST_E4M3, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return Rows(codes, x.dtype, scales)


@triton.jit
def _quantize_rows_kernel(
    x, codes, scales, x_stride, SIZE: tl.constexpr, PADDED: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):  # one row
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), axis=0)
    scale = tl.where(largest == 0, 1.0, tl.div_rn(largest, LARGEST))
    tl.store(scales + row, scale)
    tl.store(codes + row * PADDED + column, tl.div_rn(numbers, scale).to(tl.float8e4nv), mask=column < PADDED)
