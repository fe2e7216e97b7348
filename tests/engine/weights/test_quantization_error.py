"""What quantization costs in accuracy, compared with llama.cpp's formats of as many bits."""

import pytest
import torch
from torch import Tensor

from benchmarks.ggml_formats import q4_0, q8_0
from tests.engine.weights.rounding import (
    DISTRIBUTIONS,
    relative_error,
    round_trip,
    rounded_rows,
    rounded_weight,
    weight_of,
)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Has each test draw the same numbers, whatever ran before: other draws cross bounds on errors by chance."""
    torch.manual_seed(0)


def product_errors(weight: Tensor, x: Tensor, bits: int, row_bits: int = 8) -> tuple[float, float]:
    """Returns our error and that of llama.cpp, which rounds rows to 8 bits for all its formats."""
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
    """A scale for 256 weights follows the largest of them, one for 32 does so less often."""
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
    """The transform makes such weights normal, as it does all."""
    weight = weight_of(distribution)
    ours, theirs = (relative_error(matrix, weight) for matrix in (rounded_weight(weight, 4, 8), q4_0(weight)))
    assert theirs < ours < most * theirs


def test_four_bits_are_fitted() -> None:
    weight = torch.randn(64, 1024)
    assert relative_error(round_trip(weight, 4), weight) < 0.94 * relative_error(q4_0(weight), weight)
