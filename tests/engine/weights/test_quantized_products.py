"""Matmuls with quantized weights: the kernels compute, bit for bit, what the plain reference here does."""

import math
import platform
from dataclasses import replace
from typing import Protocol, cast

import pytest
import torch
from torch import Tensor

from engine.kernels import load_kernels
from engine.weights import hadamard
from engine.weights.activation_quantization import LARGEST, ROW_GROUP_SIZE, round_rows
from engine.weights.affine_quantization import QuantizedMatrix, quantize
from engine.weights.batch_invariant_matmul import BatchInvariantWeight
from engine.weights.int4_levels import Int4Matrix, to_levels
from engine.weights.quantized_weight import KernelQuantizedWeight, TorchQuantizedWeight
from tests.engine.weights.rounding import relative_error, round_trip, rounded_weight

pytestmark = pytest.mark.usefixtures("two_threads")

# Odd sizes reach every tail: of a panel, of a pair and a group along K, of a piece of K (1024).
SHAPES = [(1, 1), (3, 17), (17, 3), (33, 64), (100, 130), (130, 100), (64, 1), (1, 100), (70, 2100)]  # N, K
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[(8, 8), (8, 16), (4, 8)], ids=["int8", "int8 of the head", "int4"])
def form(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Bits of a quantized weight, and of the rows that it multiplies."""
    return cast(tuple[int, int], request.param)


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
    """Multiplies rounded rows by quantized weights: exact sums of integers, then fused float32, group after group."""

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
        if isinstance(self._matrix, Int4Matrix):
            return dots * scales
        return fused(dots, scales, row_sums.float()[:, None] * self._matrix.minimums[:, group].float())


def integers_of(matrix: QuantizedMatrix | Int4Matrix) -> Tensor:
    if isinstance(matrix, QuantizedMatrix):
        return matrix.codes
    return replace(matrix, scales=torch.ones_like(matrix.scales)).dequantized(torch.float64)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns a * b + c in float32, rounded once (but for ties of ties) where the kernels' target can."""
    kernels = load_kernels()
    if kernels and kernels.isa == "generic" and platform.machine() == "x86_64":
        return a * b + c
    return torch.addcmul(c.double(), a.double(), b.double()).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.usefixtures("kernels")
def test_products_are_those_of_integers(n: int, k: int, dtype: torch.dtype, form: tuple[int, int]) -> None:
    weight = torch.randn(n, k).to(dtype)
    assert_equal_products(KernelQuantizedWeight(weight, *form), IntegerReference(weight, *form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("kernels")
def test_large_batches_in_blocks_of_rows_and_columns_are_no_exception(
    dtype: torch.dtype, form: tuple[int, int]
) -> None:
    weight = torch.randn(300, 2200).to(dtype)
    assert_equal_products(KernelQuantizedWeight(weight, *form), IntegerReference(weight, *form), (129, 530, 1061))


@pytest.mark.parametrize("row_bits", [8, 16])
@pytest.mark.usefixtures("kernels")
def test_the_largest_sums_fit(row_bits: int) -> None:
    weight = torch.tensor([[0.0, 255.0] * 128, [255.0] * 255 + [0.0], [-255.0] * 255 + [0.0]])
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [-1.0, 1.0]]).repeat(1, 128)
    if row_bits == 8:  # so that these are what the transforms make of them
        weight = weight @ hadamard.transform(torch.eye(256)).T
        x = x @ hadamard.inverse_transform(torch.eye(256)).T
    assert_equal_rows(KernelQuantizedWeight(weight, 8, row_bits), IntegerReference(weight, 8, row_bits), x)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.usefixtures("kernels")
def test_what_is_not_finite_stays_so(rows: int, value: float, form: tuple[int, int]) -> None:
    x = torch.randn(rows, 130)
    x[0, 70] = value
    result = KernelQuantizedWeight(torch.randn(5, 130), *form).multiply(x, None)
    assert not result[0].isfinite().any() and result[1:].isfinite().all()


@pytest.mark.usefixtures("kernels")
def test_rows_of_zeros_and_of_tiny_numbers_are_no_division_by_zero(form: tuple[int, int]) -> None:
    weight = torch.randn(5, 130)
    for factor in (0.0, 1e-40, 1e-37):
        result = KernelQuantizedWeight(weight, *form).multiply(torch.randn(3, 130) * factor, None)
        assert result.abs().max() <= factor * 100


@pytest.mark.usefixtures("kernels")
def test_rounding_of_rows_adds_little_to_the_error_of_the_weights(form: tuple[int, int]) -> None:
    weight, x = torch.randn(200, 1000), torch.randn(30, 1000)
    result, exact = KernelQuantizedWeight(weight, *form).multiply(x, None), x @ rounded_weight(weight, *form).T
    assert relative_error(result, exact) < {16: 0.0001, 8: 0.01}[form[1]]  # the weights' own are 0.006 and 0.09


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("kernels")
def test_a_result_does_not_depend_on_the_number_of_threads(dtype: torch.dtype, form: tuple[int, int]) -> None:
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
    expected = torch.cat([BatchInvariantWeight(part).multiply(x, None) for part in dense.split(1024)], dim=1)
    assert torch.equal(quantized.multiply(x, None), expected)
    assert torch.equal(quantized.multiply(x[3:4], None), expected[3:4])
    bias = torch.randn(n).to(dtype)
    torch.testing.assert_close(quantized.multiply(x, bias), expected + bias, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("kernels")
def test_what_does_not_fit_a_packed_weight_is_refused(form: tuple[int, int]) -> None:
    packed = KernelQuantizedWeight(torch.randn(5, 70), *form)
    for x in (torch.randn(2, 200), torch.randn(2, 100), torch.randn(70)):  # 100 are padded to as many as 70
        with pytest.raises(RuntimeError, match="do not fit a weight"):
            packed.multiply(x, None)
    with pytest.raises(RuntimeError, match="bias"):
        packed.multiply(torch.randn(2, 70), torch.randn(4))
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        packed.multiply(torch.randn(2, 70).half(), None)


@pytest.mark.usefixtures("kernels")
def test_what_cannot_be_quantized_is_refused(bits: int) -> None:
    with pytest.raises(RuntimeError, match="8 or 4 bits"):
        torch.ops.twostep.quantize(torch.randn(2, 2), 6, 0)
    for weight in (torch.randn(3), torch.randn(0, 3), torch.randn(3, 3).half()):
        with pytest.raises(RuntimeError, match="quantized"):
            torch.ops.twostep.quantize(weight, bits, 0)
