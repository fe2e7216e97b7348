"""Quantized weights behind the interface of `engine.packed_weight`: through the C++ kernel, or through torch.

Both multiply with the numbers that `dequantize` gives, so each computes exactly what its dense counterpart would.
"""

from typing import cast

import torch
from torch import Tensor

from engine.packed_weight import FixedTileWeight
from engine.quantization import NUM_REFITS, QuantizedMatrix, dequantize, quantize

__all__ = ["KernelQuantizedWeight", "TorchQuantizedWeight"]

_COLUMNS_AT_ONCE = 1024  # of the result, so that the weight is never dequantized as a whole


class KernelQuantizedWeight:
    """Multiplies through the C++ kernel, which expands the codes in registers: float32 or bfloat16, on the CPU."""

    def __init__(self, weight: Tensor, bits: int) -> None:  # [N, K]
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.bits = bits
        parts = torch.ops.twostep.quantize(weight, bits, NUM_REFITS[bits])  # those of quantize(weight, bits)
        self.packed: Tensor = torch.ops.twostep.pack_quantized(*parts, bits, weight.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return cast(Tensor, torch.ops.twostep.linear_quantized(x, self.packed, bias, self.shape[0], self.bits))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


class TorchQuantizedWeight:
    """Dequantizes in every call, some columns at a time, and multiplies in torch's fixed tiles."""

    def __init__(self, weight: Tensor, bits: int) -> None:  # [N, K]
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self._bits = bits
        matrix = quantize(weight, bits)
        # A byte holds bits of codes that lie next to each other along K, the first in its low bits.
        padded = torch.nn.functional.pad(matrix.codes, (0, -weight.shape[1] % (8 // bits)))
        self._bytes = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << bits
        self._scales, self._minimums = matrix.scales, matrix.minimums

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty(x.shape[0], self.shape[0])
        for start in range(0, self.shape[0], _COLUMNS_AT_ONCE):
            columns = slice(start, start + _COLUMNS_AT_ONCE)
            out[:, columns] = self._dense(columns).multiply(x, None if bias is None else bias[columns])
        return out

    def _dense(self, columns: slice) -> FixedTileWeight:
        codes = self._bytes[columns]
        if self._bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        matrix = QuantizedMatrix(codes[:, : self.shape[1]], self._scales[columns], self._minimums[columns], self._bits)
        return FixedTileWeight(dequantize(matrix, self.dtype))

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes + self._scales.nbytes + self._minimums.nbytes
