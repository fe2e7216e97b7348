"""Quantized weights for the product in Triton. Imported only where the device is a GPU."""

import torch
from torch import Tensor, nn

from engine.checkpoint.stored_tensor import dense
from engine.kernels.cuda.integers import WORD_ROWS
from engine.kernels.cuda.linear import Coding, Rows
from engine.kernels.cuda.row_quantization import LARGEST_E4M3, quantized_rows
from engine.weights.affine_quantization import BITS, GROUP_SIZES, quantize
from engine.weights.quantized_weight import check_finite
from engine.weights.triton_weight import TritonWeight

__all__ = ["TritonFp8Weight", "TritonIntegerWeight", "triton_quantized"]


def triton_quantized(weight: Tensor, quantization: str, num_columns: int | None = None) -> TritonWeight:
    """Returns the weight [N, K], which is not kept, as fp8, int8 or int4; `num_columns` are those of a whole matrix, as
    `TritonWeight` has them. Raises ModelError for NaN or infinity."""
    weight = dense(weight)
    check_finite(weight)
    if quantization == "fp8":
        return TritonFp8Weight(weight, num_columns)
    return TritonIntegerWeight(weight, BITS[quantization], num_columns)


class TritonFp8Weight(TritonWeight):
    """A weight in e4m3 with a scale for each row. The rows that it multiplies are rounded likewise."""

    @property
    def _code_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def _stored(self, weight: Tensor) -> Tensor:
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        scales = torch.where(largest == 0, 1.0, largest / LARGEST_E4M3)
        self.coding = Coding(scales[None])
        codes = (weight.float() / scales).to(torch.float8_e4m3fn)
        return nn.functional.pad(codes.view(torch.uint8), (0, self.num_missing)).view(codes.dtype)

    def taken(self, x: Tensor) -> Rows:
        self._check(x)
        return quantized_rows(x, self.rows.shape[1])


class TritonIntegerWeight(TritonWeight):
    """A weight in integers, as `engine.weights.affine_quantization` has them, which are expanded in the product. Rows
    that it multiplies are not rounded.

    The product in the same order of the numbers that the codes stand for is the plain path: bits are the same.
    """

    def __init__(self, weight: Tensor, bits: int, num_columns: int | None = None) -> None:  # [N, K]
        self._bits = bits
        super().__init__(weight, num_columns)

    @property
    def _code_dtype(self) -> torch.dtype:
        return torch.uint8

    def _stored(self, weight: Tensor) -> Tensor:
        matrix = quantize(weight, self._bits)
        size, num_in = GROUP_SIZES[self._bits], self.shape[1] + self.num_missing
        groups = _in_one_word(matrix.scales * _UNITS[self._bits], matrix.minimums)
        groups = nn.functional.pad(groups, (0, -(-num_in // size) - groups.shape[1]))
        of_step = groups.view(len(groups), -1, max(1, self.order.block_k // size)).transpose(0, 1)
        self.coding = Coding(of_step.contiguous(), self._bits, size)
        codes = nn.functional.pad(matrix.codes, (0, self.num_missing, 0, -len(weight) % WORD_ROWS))
        return _words(codes, self.order.block_k, self._bits)


_UNITS = {8: 64, 4: 1}  # integers that the product takes for one, by their bits


def _in_one_word(scales: Tensor, minimums: Tensor) -> Tensor:
    """Returns two tensors of bfloat16 as one in int32; the bits of the second are the lower half."""
    high, low = (each.view(torch.int16).int() for each in (scales, minimums))
    return high << 16 | low & 0xFFFF


def _words(codes: Tensor, step: int, bits: int) -> Tensor:
    """Returns codes [N, K] as words [N / WORD_ROWS, steps, WORD_ROWS, words], in the order in which a tile reads them.

    A step's columns are cut into as many parts as half a word has codes. Each half has one code of each part; a word's
    two are those of neighbours.
    """
    num_parts = 16 // bits
    parts = codes.view(len(codes), -1, num_parts, step // num_parts // 2, 2).to(torch.int32).unbind(2)
    if bits == 4:
        halves = parts[0] | parts[1] << 4 | parts[2] << 8 | parts[3] << 12
    else:  # the highest bits are kept inverted
        lowest = parts[0] & 127 | (parts[1] & 127) << 7
        halves = lowest | (~parts[0] >> 7 & 1) << 14 | (~parts[1] >> 7 & 1) << 15
    words = halves[..., 0] | halves[..., 1] << 16
    return words.view(-1, WORD_ROWS, *words.shape[1:]).transpose(1, 2).contiguous()
