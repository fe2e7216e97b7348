"""Mends Triton's interpreter, which runs kernels on the CPU, where its numbers are not those of a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


def make_exact() -> None:
    """Replaces the interpreter's product of matrices, its rounding to bfloat16 and e4m3, and the instructions
    that kernels name.

    Its own product takes the bits of bfloat16 for integers, and sums in an order that depends on the shapes. This one
    adds product by product, as every tile of a GPU does for each row. Its own conversions to bfloat16 and e4m3 cut off;
    those of a GPU round to the nearest number, and to an even one between two.
    """
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_inline_asm = _named
    interpreter._convert_float = _converted


def _named(self, assembly, constraints, operands, types, is_pure, pack):  # type: ignore[no-untyped-def]
    """The instructions that kernels name, on words of 32 bits: a & b | c, and a * b + c of two numbers in bfloat16."""
    a, b, c = (np.ascontiguousarray(each.data) for each in operands)
    if assembly == "lop3.b32 $0, $1, $2, $3, 0xEA;":
        words = a & b | c
    else:
        assert assembly == "fma.rn.bf16x2 $0, $1, $2, $3;"
        a, b, c = ((each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in (a, b, c))
        words = _converted(a * b + c, tl.float32, tl.bfloat16, None).view(np.int32)
    return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(words, tl.int32))


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
    left, right, total = _widened(a), _widened(b), d.data.astype(np.float32).copy()
    for k in range(left.shape[-1]):
        total = total + left[..., :, k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def _widened(operand: interpreter.TensorHandle) -> np.ndarray:
    numbers = np.asarray(operand.data)
    if operand.dtype.scalar == tl.float8e4nv:
        return torch.from_numpy(numbers.view(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    if operand.dtype.scalar == tl.bfloat16:
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def _converted(numbers: np.ndarray, from_type: tl.dtype, to_type: tl.dtype, rounding_mode: Any) -> np.ndarray:
    if (from_type, to_type) == (tl.float32, tl.float8e4nv):
        rounded = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy().reshape(np.shape(numbers))
    if (from_type, to_type) != (tl.float32, tl.bfloat16):
        return _convert_float(numbers, from_type, to_type, rounding_mode)
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16).reshape(np.shape(numbers))
