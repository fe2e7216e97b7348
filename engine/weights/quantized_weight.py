"""Quantized weights with the interface of `engine.weights.packed_weight`, multiplied by the C++ kernels or by torch."""

from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from engine.core.errors import ModelError
from engine.weights.affine_quantization import NUM_REFITS, QuantizedMatrix, dequantize, quantize
from engine.weights.batch_invariant_matmul import BatchInvariantWeight
from engine.weights.int4_levels import Int4Matrix, to_levels
from engine.weights.packed_weight import check_rows

__all__ = ["KernelQuantizedWeight", "TorchQuantizedWeight", "check_finite"]

_COLUMNS_AT_ONCE = 1024  # columns of the result, so that the weight is never dequantized as a whole


class KernelQuantizedWeight:
    """A quantized weight for the C++ kernels, which multiply float32 or bfloat16 rows, on the CPU.

    Rows are rounded to `row_bits`. With 8, rows and weight are transformed before (`engine.weights.hadamard`); with 16,
    for weights of 8 bits only, they are not.
    """

    def __init__(self, weight: Tensor, bits: int, row_bits: int = 8) -> None:  # [N, K]
        quantize_and_pack = torch.ops.twostep.quantize_and_pack
        packed, is_finite = quantize_and_pack(weight.detach(), bits, row_bits, NUM_REFITS[bits])
        if not is_finite:
            raise _not_finite(weight)
        self._set(packed, weight.shape, weight.dtype, bits, row_bits)

    @classmethod
    def from_packed(
        cls, packed: Tensor, shape: torch.Size, dtype: torch.dtype, bits: int, row_bits: int
    ) -> "KernelQuantizedWeight":
        """Returns the weight of this shape [N, K] that was quantized and packed before, as `packed`."""
        weight = cls.__new__(cls)
        weight._set(packed, shape, dtype, bits, row_bits)
        return weight

    def _set(self, packed: Tensor, shape: torch.Size, dtype: torch.dtype, bits: int, row_bits: int) -> None:
        self.packed, self.shape, self.dtype, self.device = packed, shape, dtype, packed.device
        self.bits, self.row_bits, ops = bits, row_bits, torch.ops.twostep
        linear_int8 = ops.linear_int8 if row_bits == 8 else ops.linear_int8_wide_rows
        self._linear = ops.linear_int4 if bits == 4 else linear_int8

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        check_rows(x, self.shape)
        return cast(Tensor, self._linear(x, self.packed, bias, self.shape[0]))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


def check_finite(weight: Tensor) -> None:
    """Raises ModelError if there is NaN or infinity."""
    if not all(end.isfinite() for end in weight.aminmax()):  # NaN is both
        raise _not_finite(weight)


def _not_finite(weight: Tensor) -> ModelError:
    """Says that there is NaN or infinity, which quantization would spread over a group until it looks harmless."""
    return ModelError(f"A weight {[*weight.shape]} of the checkpoint has NaN or infinity: it is damaged.")


class TorchQuantizedWeight:
    """A quantized weight that is dequantized in every call, some columns at a time, and multiplied by torch.

    Rows are not quantized.
    """

    def __init__(self, weight: Tensor, bits: int) -> None:  # [N, K]
        check_finite(weight)
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        matrix = quantize(weight, bits)
        self._matrix = matrix if bits == 8 else _with_two_codes_per_byte(to_levels(weight, matrix))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty(x.shape[0], self.shape[0])
        for start in range(0, self.shape[0], _COLUMNS_AT_ONCE):
            columns = slice(start, start + _COLUMNS_AT_ONCE)
            out[:, columns] = self._dense(columns).multiply(x, None if bias is None else bias[columns])
        return out

    def _dense(self, columns: slice) -> BatchInvariantWeight:
        part = replace(self._matrix, **{name: tensor[columns] for name, tensor in _tensors(self._matrix).items()})
        if isinstance(part, QuantizedMatrix):
            return BatchInvariantWeight(dequantize(part, self.dtype))
        codes = torch.stack([part.codes & 15, part.codes >> 4], dim=-1).flatten(1)
        return BatchInvariantWeight(replace(part, codes=codes[:, : self.shape[1]]).dequantized(self.dtype))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self._matrix).values())


def _with_two_codes_per_byte(matrix: Int4Matrix) -> Int4Matrix:
    """Returns the matrix with pairs of codes that are neighbours along K in one byte, the first in its low bits."""
    padded = torch.nn.functional.pad(matrix.codes, (0, -matrix.codes.shape[1] % 2))
    return replace(matrix, codes=padded[:, ::2] | padded[:, 1::2] << 4)


def _tensors(matrix: QuantizedMatrix | Int4Matrix) -> dict[str, Any]:
    values = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
