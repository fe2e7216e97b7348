"""Launches of quantized products in Triton, for rows of every size; they are compiled, not run."""

import torch
from triton.runtime import driver

from engine.kernels.cuda.experts import Experts, multiply_by_experts, sort_slots
from engine.kernels.cuda.integers import WORD_ROWS
from engine.kernels.cuda.linear import Coding, Rows, linear, sum_order, tile_for
from engine.kernels.cuda.row_quantization import quantized_rows
from tests.gpu.cross_compile import SHARED_KIB

_SHAPES = ((28672, 4096), (4096, 14336))  # N, K: of one segment, and of several
_EXPERTS = (128, 1536, 2048)  # E, N, K
_BF16 = torch.bfloat16


def launch_all() -> None:
    """Launches products in every tile that the GPU gets which it is compiled for; before 8.9, there is no fp8."""
    has_fp8 = driver.active.get_current_target().arch >= 89
    for bits in (8, 4):
        for shape in _SHAPES:
            words = torch.zeros(shape[0] // WORD_ROWS, shape[1] // 128, WORD_ROWS, 4 * bits, dtype=torch.int32)
            _launch(words, _integers(shape, bits))
        _launch_experts(torch.int32, _integers(_EXPERTS, bits))
    if has_fp8:
        for shape in _SHAPES:
            _launch(
                torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn), Coding(torch.zeros(1, shape[0], 1))
            )
        _launch_experts(torch.float8_e4m3fn, Coding(torch.zeros(_EXPERTS[0], 1, _EXPERTS[1], 1)))


def _integers(shape: tuple[int, ...], bits: int) -> Coding:
    size = {8: 256, 4: 32}[bits]
    of_step = max(1, 128 // size)
    groups = torch.zeros(*shape[:-2], shape[-1] // size // of_step, shape[-2], of_step, dtype=torch.int32)
    return Coding(groups, bits, size)


def _rows(num_rows: int, num_in: int, coding: Coding) -> Rows:
    x = torch.zeros(num_rows, num_in, dtype=_BF16)
    return quantized_rows(x, num_in) if coding.bits == 0 else Rows(x, _BF16)


def _launch(codes: torch.Tensor, coding: Coding) -> None:
    num_out = coding.scales.shape[-2]
    num_in = codes.numel() * codes.itemsize * 8 // (coding.bits or 8) // num_out
    order = sum_order(num_out, num_in, torch.uint8)
    capability = driver.active.get_current_target().arch
    shared_bytes = SHARED_KIB[capability] << 10
    for num_rows in (1, 64, 128, 2048):
        num_segments = order.num_segments(num_in)
        tile = tile_for(num_rows, num_out, num_segments, _BF16, shared_bytes, coding, capability == 90)
        linear(_rows(num_rows, num_in, coding), codes, None, order, tile, coding)


def _launch_experts(number_type: torch.dtype, coding: Coding) -> None:
    num_experts, num_out, num_in = _EXPERTS
    stride = WORD_ROWS * num_in * coding.bits // 32 if coding.bits else num_in
    order = sum_order(num_out, num_in, torch.uint8)
    addresses = torch.zeros(num_experts, dtype=torch.int64)
    experts = Experts(addresses, None, num_out, num_in, stride, order, number_type, coding)
    for num_rows in (1, 512, 4096):
        slots = sort_slots(torch.zeros(num_rows, 8, dtype=torch.int64), num_experts)
        multiply_by_experts(_rows(num_rows, num_in, coding), experts, slots, False)
