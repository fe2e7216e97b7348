"""Test weights of several distributions, and the numbers that quantized weights and rows stand for."""

import torch
from torch import Tensor

from engine.weights import hadamard
from engine.weights.activation_quantization import LARGEST, ROW_GROUP_SIZE, round_rows
from engine.weights.affine_quantization import dequantize, quantize, spread
from engine.weights.int4_levels import to_levels

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


def round_trip(weight: Tensor, bits: int) -> Tensor:
    matrix = quantize(weight, bits)
    return to_levels(weight, matrix).dequantized(weight.dtype) if bits == 4 else dequantize(matrix, weight.dtype)


def rounded_weight(weight: Tensor, bits: int, row_bits: int) -> Tensor:
    """Returns the weight [N, K] that a packed weight stands for."""
    if row_bits == 16:
        return round_trip(weight, bits)
    return round_trip(hadamard.inverse_transform(weight), bits) @ hadamard.transform(torch.eye(weight.shape[1])).T


def rounded_rows(x: Tensor, row_bits: int) -> Tensor:
    """Returns the rows [T, K] that the integers stand for which a packed weight multiplies."""
    numbers, scales = round_rows(x if row_bits == 16 else hadamard.transform(x), LARGEST[row_bits])
    rows = numbers * spread(scales, ROW_GROUP_SIZE, numbers.shape[1])
    return rows if row_bits == 16 else rows @ hadamard.inverse_transform(torch.eye(x.shape[1])).T


def relative_error(result: Tensor, weight: Tensor) -> float:
    return float((result - weight).norm() / weight.norm())
