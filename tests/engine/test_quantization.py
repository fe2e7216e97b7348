"""Quantized weights: the kernels compute, bit for bit, what the plain reference here says."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

import pytest
import torch
from torch import Tensor

from benchmarks.ggml_formats import q4_0, q8_0
from engine import hadamard
from engine.integer_levels import LeveledMatrix, to_levels
from engine.kernels import load_kernels
from engine.packed_weight import FixedTileWeight, PackedWeight
from engine.quantization import BITS, GROUP_SIZES, NUM_REFITS, QuantizedMatrix, dequantize, quantize, spread
from engine.quantized_weight import KernelQuantizedWeight, TorchQuantizedWeight
from engine.rounded_rows import LARGEST, ROW_GROUP_SIZE, round_rows

# Odd sizes reach every tail: of a panel, of a pair and a group along K, of a piece of K (1024).
pytestmark = pytest.mark.usefixtures("two_threads")

SHAPES = [(1, 1), (3, 17), (17, 3), (33, 64), (100, 130), (130, 100), (64, 1), (1, 100), (70, 2100)]  # N, K
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=BITS.values(), ids=BITS)
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[(8, 8), (8, 16), (4, 8)], ids=["int8", "int8 of the head", "int4"])
def form(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Bits of the weight and of the rows that it multiplies."""
    return cast(tuple[int, int], request.param)


def needs_kernels() -> None:
    load_kernels() or pytest.skip("no kernels on this machine")


class Product(Protocol):
    shape: torch.Size
    dtype: torch.dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


def assert_equal_rows(quantized: Product, reference: Product, x: Tensor, bias: Tensor | None = None) -> None:
    assert torch.equal(quantized.multiply(x, bias), reference.multiply(x, bias)), len(x)


def assert_equal_products(quantized: Product, reference: Product, rows: tuple[int, ...] = ROWS) -> None:
    num_out, num_in = reference.shape
    bias = torch.randn(num_out).to(reference.dtype)
    for count in rows:
        x = torch.randn(count, num_in).to(reference.dtype)
        assert_equal_rows(quantized, reference, x, bias)
        assert_equal_rows(quantized, reference, x)


class IntegerReference:
    """The product of rounded rows with weights: exact sums of integers, then float32, fused, group after group."""

    def __init__(self, weight: Tensor, bits: int, row_bits: int = 8) -> None:
        self.shape, self.dtype, self._row_bits = weight.shape, weight.dtype, row_bits
        weight = hadamard.inverse_transform(weight) if row_bits == 8 else weight
        matrix = quantize(weight, bits)
        self._matrix = matrix if bits == 8 else to_levels(weight, matrix)
        self._integers = integers_of(self._matrix)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        numbers, row_scales = round_rows(x if self._row_bits == 16 else hadamard.transform(x), LARGEST[self._row_bits])
        total = torch.zeros(len(x), self.shape[0])
        for group, (rows, weights) in enumerate(zip(self._split(numbers), self._split(self._integers), strict=True)):
            shares = (rows @ weights.T).float()
            total = fused(self._scaled(shares, rows.sum(1), group), row_scales[:, group, None], total)
        return (total if bias is None else total + bias.float()).to(x.dtype)

    def _split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        return numbers.double().split(ROW_GROUP_SIZE, dim=1)

    def _scaled(self, dots: Tensor, row_sums: Tensor, group: int) -> Tensor:
        scales = self._matrix.scales[:, group].float()
        if isinstance(self._matrix, LeveledMatrix):
            return dots * scales
        return fused(dots, scales, row_sums.float()[:, None] * self._matrix.minimums[:, group].float())


def integers_of(matrix: QuantizedMatrix | LeveledMatrix) -> Tensor:
    if isinstance(matrix, QuantizedMatrix):
        return matrix.codes
    return replace(matrix, scales=torch.ones_like(matrix.scales)).dequantized(torch.float64)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once (but for ties of ties) where the kernels' target can."""
    kernels = load_kernels()
    if kernels and kernels.isa == "generic":
        return a * b + c
    return torch.addcmul(c.double(), a.double(), b.double()).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_those_of_integers(n: int, k: int, dtype: torch.dtype, form: tuple[int, int]) -> None:
    needs_kernels()
    weight = torch.randn(n, k).to(dtype)
    assert_equal_products(KernelQuantizedWeight(weight, *form), IntegerReference(weight, *form))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_batches_in_blocks_of_rows_and_columns_are_no_exception(
    dtype: torch.dtype, form: tuple[int, int]
) -> None:
    needs_kernels()
    weight = torch.randn(300, 2200).to(dtype)
    assert_equal_products(KernelQuantizedWeight(weight, *form), IntegerReference(weight, *form), (129, 530, 1061))


def test_the_largest_sums_fit() -> None:
    needs_kernels()
    weight = torch.tensor([[0.0, 255.0] * 128, [255.0] * 255 + [0.0], [-255.0] * 255 + [0.0]])
    x = torch.tensor([1.0, -1.0])[:, None].expand(2, 256)
    assert_equal_rows(KernelQuantizedWeight(weight, 8), IntegerReference(weight, 8), x)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_not_finite_stays_so(rows: int, value: float, form: tuple[int, int]) -> None:
    needs_kernels()
    x = torch.randn(rows, 130)
    x[0, 70] = value
    result = KernelQuantizedWeight(torch.randn(5, 130), *form).multiply(x, None)
    assert not result[0].isfinite().any() and result[1:].isfinite().all()


def test_rows_of_zeros_and_of_tiny_numbers_are_no_division_by_zero(form: tuple[int, int]) -> None:
    needs_kernels()
    weight = torch.randn(5, 130)
    for factor in (0.0, 1e-40, 1e-37):
        result = KernelQuantizedWeight(weight, *form).multiply(torch.randn(3, 130) * factor, None)
        assert result.abs().max() <= factor * 100


def test_rounding_of_rows_adds_little_to_the_error_of_the_weights(form: tuple[int, int]) -> None:
    needs_kernels()
    weight, x = torch.randn(200, 1000), torch.randn(30, 1000)
    result, exact = KernelQuantizedWeight(weight, *form).multiply(x, None), x @ rounded_weight(weight, *form).T
    assert relative_error(result, exact) < {16: 0.0001, 8: 0.01}[form[1]]  # the weights' own are 0.006 and 0.09


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_does_not_depend_on_the_number_of_threads(dtype: torch.dtype, form: tuple[int, int]) -> None:
    needs_kernels()
    weight, x = torch.randn(500, 700).to(dtype), torch.randn(40, 700).to(dtype)
    results = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        results.append(KernelQuantizedWeight(weight, *form).multiply(x, None))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (1030, 20)])
def test_without_kernels_torch_multiplies_with_the_same_numbers(n: int, k: int, dtype: torch.dtype, bits: int) -> None:
    weight = torch.randn(n, k).to(dtype)
    dense = round_trip(weight, bits)
    quantized, x = TorchQuantizedWeight(weight, bits), torch.randn(20, k).to(dtype)
    expected = torch.cat([FixedTileWeight(part).multiply(x, None) for part in dense.split(1024)], dim=1)
    assert torch.equal(quantized.multiply(x, None), expected)
    assert torch.equal(quantized.multiply(x[3:4], None), expected[3:4])
    bias = torch.randn(n).to(dtype)
    torch.testing.assert_close(quantized.multiply(x, bias), expected + bias, rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_refused(bits: int) -> None:
    needs_kernels()
    packed = KernelQuantizedWeight(torch.randn(5, 70), bits)
    for x, bias in [(torch.randn(2, 200), None), (torch.randn(2, 70), torch.randn(4)), (torch.randn(70), None)]:
        with pytest.raises(RuntimeError):
            packed.multiply(x, bias)
    with pytest.raises(RuntimeError):
        packed.multiply(torch.randn(2, 70).half(), None)
    with pytest.raises(RuntimeError, match="8 or 4 bits"):
        torch.ops.twostep.quantize(torch.randn(2, 2), 6, 0)
    for weight in (torch.randn(3), torch.randn(0, 3), torch.randn(3, 3).half()):
        with pytest.raises(RuntimeError, match="quantized"):
            torch.ops.twostep.quantize(weight, bits, 0)


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
    tolerance = {8: 1e-4, 4: 2**-8}[bits]  # of 4 bits, that of a bfloat16 scale
    torch.testing.assert_close(round_trip(weight, bits), weight, rtol=tolerance, atol=0)


def test_numbers_closer_to_each_other_than_to_zero_keep_their_differences_in_eight_bits() -> None:
    weight = 1 / 3 + torch.rand(4, 64) * 1e-5  # 1/3 rounds up to a bfloat16 number above them all
    assert (round_trip(weight, 8) - weight).abs().max() < 2**-9 / 255


def test_a_number_of_four_bits_is_an_integer_times_its_scale() -> None:
    codes = torch.tensor([[0, 15] * 140], dtype=torch.uint8)
    multipliers, zeros = torch.tensor([[3, 8] + [1] * 7], dtype=torch.uint8), torch.tensor([[0, 15] + [7] * 7])
    matrix = LeveledMatrix(codes, multipliers, zeros.to(torch.uint8), torch.tensor([[0.5, 2.0]]).bfloat16())
    expected = [0.0, 22.5] * 16 + [-60.0, 0.0] * 16 + [-3.5, 4.0] * 96 + [-14.0, 16.0] * 12
    assert matrix.dequantized(torch.float32).tolist() == [expected]
    assert matrix.levels.tolist() == [[3, 0xF8] + [0x71] * 7]


def test_integers_of_four_bits_fit_in_eight() -> None:
    weight = torch.cat([torch.randn(8, 300) + offset for offset in (-9, -3, 0, 1, 3, 9)])
    matrix = to_levels(weight, quantize(weight, 4))
    integers = replace(matrix, scales=torch.ones_like(matrix.scales)).dequantized(torch.float32)
    assert integers.abs().max() <= 127 and integers.abs().amax(1).median() > 60


def round_trip(weight: Tensor, bits: int) -> Tensor:
    matrix = quantize(weight, bits)
    return to_levels(weight, matrix).dequantized(weight.dtype) if bits == 4 else dequantize(matrix, weight.dtype)


def rounded_weight(weight: Tensor, bits: int, row_bits: int) -> Tensor:
    """[N, K], what the packed weight stands for."""
    if row_bits == 16:
        return round_trip(weight, bits)
    return round_trip(hadamard.inverse_transform(weight), bits) @ hadamard.transform(torch.eye(weight.shape[1])).T


def rounded_rows(x: Tensor, row_bits: int) -> Tensor:
    """[T, K], what the integers stand for that a packed weight multiplies."""
    numbers, scales = round_rows(x if row_bits == 16 else hadamard.transform(x), LARGEST[row_bits])
    rows = numbers * spread(scales, ROW_GROUP_SIZE, numbers.shape[1])
    return rows if row_bits == 16 else rows @ hadamard.inverse_transform(torch.eye(x.shape[1])).T


def relative_error(result: Tensor, weight: Tensor) -> float:
    return float((result - weight).norm() / weight.norm())


DISTRIBUTIONS = ("normal", "heavy", "uniform", "sparse", "offset", "bfloat16")


def weight_of(distribution: str, n: int = 64, k: int = 1024) -> Tensor:
    normal = torch.randn(n, k)
    return {
        "normal": normal,
        "heavy": torch.distributions.StudentT(3.0).sample((n, k)),
        "uniform": torch.rand(n, k) - 0.5,
        "sparse": normal.bfloat16() * (torch.rand(n, k) < 0.1).float(),
        "offset": normal + 3,
        "bfloat16": normal.bfloat16().float(),
    }[distribution]


def product_errors(weight: Tensor, x: Tensor, bits: int, row_bits: int = 8) -> tuple[float, float]:
    """Ours and llama.cpp's, which rounds rows to 8 bits for all its formats."""
    ours = rounded_rows(x, row_bits) @ rounded_weight(weight, bits, row_bits).T
    theirs = q8_0(x) @ {8: q8_0, 4: q4_0}[bits](weight).T
    return relative_error(ours, x @ weight.T), relative_error(theirs, x @ weight.T)


@pytest.mark.parametrize("distribution", ["normal", "heavy", "bfloat16"])
def test_products_of_rows_with_heavy_tails_err_less_than_llama_cpps(distribution: str, bits: int) -> None:
    ours, theirs = product_errors(weight_of(distribution), weight_of("heavy", 50), bits)
    assert ours < theirs


def test_a_number_far_larger_than_the_others_of_its_row_costs_little() -> None:
    x = torch.randn(50, 1024)
    x[:, 500] *= 100
    ours, theirs = product_errors(weight_of("normal"), x, 8)
    assert ours < 0.75 * theirs


@pytest.mark.parametrize(("bits", "low", "high"), [(8, 1, 1.35), (4, 0.8, 1)])
def test_products_of_normal_rows_err_little_more_than_llama_cpps(bits: int, low: float, high: float) -> None:
    ours, theirs = product_errors(weight_of("normal"), torch.randn(50, 1024), bits)
    assert low < ours / theirs < high


@pytest.mark.parametrize("distribution", [each for each in DISTRIBUTIONS if each != "heavy"])
def test_products_of_the_head_err_less_than_llama_cpps(distribution: str) -> None:
    ours, theirs = product_errors(weight_of(distribution), torch.randn(50, 1024), 8, row_bits=16)
    assert ours < theirs


def test_where_only_weights_have_heavy_tails_the_head_errs_little_more() -> None:
    """A scale for 256 of them follows the largest, one for 32 does so less often."""
    ours, theirs = product_errors(weight_of("heavy"), torch.randn(50, 1024), 8, row_bits=16)
    assert theirs < ours < 1.35 * theirs


def test_weights_of_eight_bits_alone_err_a_fifth_more_than_ggmls() -> None:
    weight = weight_of("normal")
    error, bound = (relative_error(matrix, weight) for matrix in (rounded_weight(weight, 8, 8), q8_0(weight)))
    assert bound < error < 1.22 * bound


@pytest.mark.parametrize("distribution", ["normal", "heavy", "bfloat16"])
def test_weights_of_four_bits_err_less_than_ggmls_format_of_as_many(distribution: str) -> None:
    weight = weight_of(distribution)
    assert relative_error(rounded_weight(weight, 4, 8), weight) < relative_error(q4_0(weight), weight)


@pytest.mark.parametrize(("distribution", "most"), [("uniform", 1.3), ("sparse", 1.7)])
def test_weights_of_four_bits_as_no_model_has_them_err_more(distribution: str, most: float) -> None:
    """The transform makes them normal, as it does all."""
    weight = weight_of(distribution)
    ours, theirs = (relative_error(matrix, weight) for matrix in (rounded_weight(weight, 4, 8), q4_0(weight)))
    assert theirs < ours < most * theirs


def test_four_bits_are_fitted() -> None:
    weight = torch.randn(64, 1024)
    assert relative_error(round_trip(weight, 4), weight) < 0.94 * relative_error(q4_0(weight), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_kernel_finds_the_same_codes_scales_and_minimums(distribution: str, dtype: torch.dtype, bits: int) -> None:
    needs_kernels()
    for factor in (1.0, -1.0, 1e-38, 1e30):
        weight = (weight_of(distribution, 33, 1000) * factor).to(dtype)
        matrix = quantize(weight, bits)
        codes, scales, minimums = torch.ops.twostep.quantize(weight.T.contiguous().T, bits, NUM_REFITS[bits])
        assert torch.equal(codes, matrix.codes)
        assert torch.equal(scales, matrix.scales) and torch.equal(minimums, matrix.minimums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_kernel_finds_the_same_levels(distribution: str, dtype: torch.dtype) -> None:
    needs_kernels()
    for factor in (1.0, -1.0, 1e-38, 1e15, 1e30):
        weight = (weight_of(distribution, 33, 1000) * factor).to(dtype)
        matrix = quantize(weight, 4)
        expected = to_levels(weight, matrix)
        codes, levels, scales = torch.ops.twostep.to_levels(weight.T.contiguous().T, matrix.scales, matrix.minimums)
        assert torch.equal(levels, expected.levels) and torch.equal(scales, expected.scales)
        assert torch.equal(codes, expected.codes)


def test_a_tail_of_a_group_is_as_good_as_a_whole_one(bits: int) -> None:
    """The numbers that fill it up must not widen its range."""
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
def test_bits_that_a_weight_takes(pack: Callable[[Tensor, int], PackedWeight], bits: int, expected: float) -> None:
    needs_kernels()
    assert pack(torch.randn(960, 512), bits).nbytes == 960 * 512 * expected / 8
