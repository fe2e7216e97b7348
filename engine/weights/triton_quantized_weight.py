"""Quantized weights for the product in Triton. Imported only where the device is a GPU."""

import torch
from torch import Tensor, nn

from engine.kernels.cuda.linear import Coding, Rows
from engine.kernels.cuda.row_quantization import LARGEST_E4M3, quantized_rows
from engine.weights.affine_quantization import BITS, GROUP_SIZES, quantize
from engine.weights.quantized_weight import check_finite
from engine.weights.triton_weight import TritonWeight

__all__ = ["TritonFp8Weight", "TritonIntegerWeight", "triton_quantized"]


def triton_quantized(weight: Tensor, quantization: str) -> TritonWeight:
    """Returns the weight [N, K], which is not kept, as fp8, int8 or int4. Raises ModelError for NaN or infinity."""
    check_finite(weight)
    return TritonFp8Weight(weight) if quantization == "fp8" else TritonIntegerWeight(weight, BITS[quantization])


class TritonFp8Weight(TritonWeight):
    """A weight in e4m3 with a scale for each row. The rows that it multiplies are rounded likewise."""

    @property
    def _multiplied_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def _stored(self, weight: Tensor) -> Tensor:
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        scales = torch.where(largest == 0, 1.0, largest / LARGEST_E4M3)
        self.coding = Coding(scales)
        codes = (weight.float() / scales).to(torch.float8_e4m3fn)
        return nn.functional.pad(codes.view(torch.uint8), (0, self.num_missing)).view(codes.dtype)

    def taken(self, x: Tensor) -> Rows:
        self._check(x)
        return quantized_rows(x, self.rows.shape[1])


class TritonIntegerWeight(TritonWeight):
    """A weight in integers, as `engine.weights.affine_quantization` has them, which are expanded in the product. Rows
    that it multiplies are not rounded.

    `TritonWeight` of the numbers that the codes stand for is the plain path: products are the same, bit for bit.
    """

    def __init__(self, weight: Tensor, bits: int) -> None:  # [N, K]
        self._bits = bits
        super().__init__(weight)

    def _stored(self, weight: Tensor) -> Tensor:
        matrix = quantize(weight, self._bits)
        size, num_in = GROUP_SIZES[self._bits], self.shape[1] + self.num_missing
        missing = -(-num_in // size) - matrix.scales.shape[1]
        scales, minimums = (nn.functional.pad(each, (0, missing)) for each in (matrix.scales, matrix.minimums))
        self.coding = Coding(scales, minimums, size, are_halves=self._bits == 4)
        codes = nn.functional.pad(matrix.codes, (0, self.num_missing))
        return _with_two_in_a_byte(codes, self.order.block_k) if self._bits == 4 else codes


def _with_two_in_a_byte(codes: Tensor, step: int) -> Tensor:
    """Returns codes of 4 bits [N, K] as bytes [N, K / 2]: of each step's columns, the second half in the high bits."""
    first, second = codes.view(len(codes), -1, 2, step // 2).unbind(2)
    return (first | second << 4).flatten(1)
