"""Mends Triton's interpreter, which runs kernels on the CPU, where its products are not those of a GPU."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def make_dot_exact() -> None:
    """Replaces the interpreter's product of matrices: its own one takes the bits of bfloat16 for integers, and sums in
    an order that depends on the shapes. This one adds product by product, as every tile of a GPU does for each row."""
    interpreter.InterpreterBuilder.create_dot = _dot


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
    left, right, total = _widened(a), _widened(b), d.data.astype(np.float32).copy()
    for k in range(left.shape[-1]):
        total = total + left[..., :, k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def _widened(operand: interpreter.TensorHandle) -> np.ndarray:
    numbers = np.asarray(operand.data)
    if operand.dtype.scalar == tl.bfloat16:
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
