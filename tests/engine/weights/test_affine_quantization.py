"""Quantized weights of 8 and 4 bits: what their codes stand for, and that the kernels find the same codes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.core.errors import ModelError
from engine.weights.affine_quantization import GROUP_SIZES, NUM_REFITS, QuantizedMatrix, dequantize, quantize
from engine.weights.int4_levels import Int4Matrix, to_levels
from engine.weights.packed_weight import PackedWeight
from engine.weights.quantized_weight import KernelQuantizedWeight, TorchQuantizedWeight
from tests.engine.weights.rounding import DISTRIBUTIONS, round_trip, weight_of

pytestmark = pytest.mark.usefixtures("two_threads")

DTYPES = [torch.float32, torch.bfloat16]


def test_a_number_is_its_groups_minimum_plus_scale_times_code() -> None:
    codes = torch.tensor([[3, 255] * 132], dtype=torch.uint8)
    matrix = QuantizedMatrix(codes, torch.tensor([[0.5, 2.0]]).bfloat16(), torch.tensor([[-1.0, 8.0]]).bfloat16(), 8)
    expected = [0.5, 126.5] * 128 + [14.0, 518.0] * 4
    assert dequantize(matrix, torch.float32).tolist() == [expected]
    assert dequantize(matrix, torch.bfloat16).tolist() == [torch.tensor(expected).bfloat16().tolist()]


def test_codes_fill_their_range(bits: int) -> None:
    size = GROUP_SIZES[bits]
    codes = quantize(torch.randn(3, 5 * size), bits).codes.view(15, size).float()
    assert codes.amax() == 2**bits - 1 and codes.amin() == 0
    assert (codes.amax(1) - codes.amin(1)).median() >= 2**bits - 4


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1 / 3, 1e-30, -7e30])
def test_equal_numbers_stay_what_they_are(value: float, bits: int) -> None:
    weight = torch.full((2, 70), value)
    tolerance = {8: 1e-4, 4: 2**-8}[bits]  # with 4 bits, that of a bfloat16 scale
    torch.testing.assert_close(round_trip(weight, bits), weight, rtol=tolerance, atol=0)


def test_numbers_closer_to_each_other_than_to_zero_keep_their_differences_in_eight_bits() -> None:
    weight = 1 / 3 + torch.rand(4, 64) * 1e-5  # 1/3 rounds up to a bfloat16 number above them all
    assert (round_trip(weight, 8) - weight).abs().max() < 2**-9 / 255


def test_a_number_of_four_bits_is_an_integer_times_its_scale() -> None:
    codes = torch.tensor([[0, 15] * 140], dtype=torch.uint8)
    multipliers, zeros = torch.tensor([[3, 8] + [1] * 7], dtype=torch.uint8), torch.tensor([[0, 15] + [7] * 7])
    matrix = Int4Matrix(codes, multipliers, zeros.to(torch.uint8), torch.tensor([[0.5, 2.0]]).bfloat16())
    expected = [0.0, 22.5] * 16 + [-60.0, 0.0] * 16 + [-3.5, 4.0] * 96 + [-14.0, 16.0] * 12
    assert matrix.dequantized(torch.float32).tolist() == [expected]
    assert matrix.levels.tolist() == [[3, 0xF8] + [0x71] * 7]


def test_integers_of_four_bits_fit_in_eight() -> None:
    weight = torch.cat([torch.randn(8, 300) + offset for offset in (-9, -3, 0, 1, 3, 9)])
    matrix = to_levels(weight, quantize(weight, 4))
    integers = replace(matrix, scales=torch.ones_like(matrix.scales)).dequantized(torch.float32)
    assert integers.abs().max() <= 127 and integers.abs().amax(1).median() > 60


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.usefixtures("kernels")
def test_the_kernel_finds_the_same_codes_scales_and_minimums(distribution: str, dtype: torch.dtype, bits: int) -> None:
    for factor in (1.0, -1.0, 1e-38, 1e30):
        weight = (weight_of(distribution, 33, 1000) * factor).to(dtype)
        matrix = quantize(weight, bits)
        codes, scales, minimums = torch.ops.twostep.quantize(weight.T.contiguous().T, bits, NUM_REFITS[bits])
        assert torch.equal(codes, matrix.codes)
        assert torch.equal(scales, matrix.scales) and torch.equal(minimums, matrix.minimums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.usefixtures("kernels")
def test_the_kernel_finds_the_same_levels(distribution: str, dtype: torch.dtype) -> None:
    for factor in (1.0, -1.0, 1e-38, 1e15, 1e30):
        weight = (weight_of(distribution, 33, 1000) * factor).to(dtype)
        matrix = quantize(weight, 4)
        expected = to_levels(weight, matrix)
        codes, levels, scales = torch.ops.twostep.to_levels(weight.T.contiguous().T, matrix.scales, matrix.minimums)
        assert torch.equal(levels, expected.levels) and torch.equal(scales, expected.scales)
        assert torch.equal(codes, expected.codes)


def test_a_tail_of_a_group_is_as_good_as_a_whole_one(bits: int) -> None:
    """The numbers that pad a group must not widen its range."""
    size = GROUP_SIZES[bits]
    weight = torch.randn(64, size + 8) * 0.01 + 5
    errors = (round_trip(weight, bits) - weight).abs()
    assert errors[:, size:].max() <= 2 * errors[:, :size].max()


@pytest.mark.parametrize(
    ("pack", "bits", "expected"),
    [
        (KernelQuantizedWeight, 8, 8.125),
        (TorchQuantizedWeight, 8, 8.125),
        (KernelQuantizedWeight, 4, 4.5),
        (TorchQuantizedWeight, 4, 4 + 16 / 32 + 16 / 256),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_bits_that_a_weight_takes(pack: Callable[[Tensor, int], PackedWeight], bits: int, expected: float) -> None:
    assert pack(torch.randn(960, 512), bits).nbytes == 960 * 512 * expected / 8


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("pack", [KernelQuantizedWeight, TorchQuantizedWeight])
def test_a_damaged_weight_is_refused(
    pack: type[KernelQuantizedWeight | TorchQuantizedWeight], number: float, bits: int, request: pytest.FixtureRequest
) -> None:
    if pack is KernelQuantizedWeight:
        request.getfixturevalue("kernels")
    weight = torch.randn(40, 70).bfloat16()
    weight[7, 9] = number
    with pytest.raises(ModelError, match="damaged"):
        pack(weight, bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "row_bits"), [(8, 8), (8, 16), (4, 8)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 65), (40, 511), (70, 1100)])
@pytest.mark.usefixtures("ops")
def test_one_pass_has_the_bits_of_its_operators(n: int, k: int, bits: int, row_bits: int, dtype: torch.dtype) -> None:
    """Sizes end within a panel, and within sixteen groups of 32."""
    ops, weight = torch.ops.twostep, torch.randn(n, k).to(dtype)
    packed, is_finite = ops.quantize_and_pack(weight, bits, row_bits, NUM_REFITS[bits])
    rows = ops.inverse_hadamard(weight) if row_bits == 8 else weight
    codes, scales, minimums = ops.quantize(rows, bits, NUM_REFITS[bits])
    levels = ops.to_levels(rows, scales, minimums) if bits == 4 else None
    expected = ops.pack_int8(codes, scales, minimums) if levels is None else ops.pack_int4(*levels)
    assert is_finite and torch.equal(packed, expected)
