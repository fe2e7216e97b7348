"""Launches of the product in Triton, for weights and rows of every size; they are compiled, not run."""

import torch
from triton.runtime import driver

from engine.kernels.cuda.linear import Rows, linear, sum_order, tile_for
from tests.gpu.cross_compile import SHARED_KIB

_ONE_SEGMENT, _SEVERAL_SEGMENTS = (28672, 4096), (4096, 14336)  # N, K
_PRODUCTS = (
    (torch.bfloat16, _ONE_SEGMENT, (1, 64, 128, 2048)),
    (torch.bfloat16, _SEVERAL_SEGMENTS, (1, 2048)),
    (torch.float32, _SEVERAL_SEGMENTS, (1, 2048)),
)


def launch_all() -> None:
    """Launches products in every tile that the GPU gets which it is compiled for."""
    shared_bytes = SHARED_KIB[driver.active.get_current_target().arch] << 10
    for dtype, (num_out, num_in), all_rows in _PRODUCTS:
        order = sum_order(num_out, num_in, dtype)
        weight, bias = torch.zeros(num_out, num_in, dtype=dtype), torch.zeros(num_out, dtype=dtype)
        for rows in all_rows:
            tile = tile_for(rows, num_out, order.num_segments(num_in), dtype, shared_bytes)
            linear(Rows(torch.zeros(rows, num_in, dtype=dtype), dtype), weight, bias, order, tile)
