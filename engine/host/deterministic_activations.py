"""silu, sigmoid and gelu whose result for an element depends on that element alone, where there are no C++ kernels.

Torch's own compute the last elements of a thread's share in another way than the rest, so they differ in the last bit
with the number of rows. Its arithmetic does not, nor do exp, erfc and tanh once they are settled (`vector_math`): these
activations are made of them. On ARM erf does in float32.
"""

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["replace_activations"]


@functools.cache
def replace_activations() -> object:
    """Puts them in place of torch's for CPU tensors, process-wide and for good; returns what keeps them there."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is wanted here: that a kernel of its own is replaced
        library.impl("sigmoid", _sigmoid, "CPU")
        library.impl("sigmoid_", lambda x: x.copy_(_sigmoid(x)), "CPU")
        library.impl("silu", _silu, "CPU")
        library.impl("silu_", lambda x: x.copy_(_silu(x)), "CPU")
        library.impl("gelu", _gelu, "CPU")
        library.impl("gelu_", lambda x, approximate="none": x.copy_(_gelu(x, approximate)), "CPU")
    return library


def _sigmoid(x: Tensor) -> Tensor:
    return (1.0 / (1.0 + torch.exp(-_wide(x)))).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    wide = _wide(x)
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    wide = _wide(x)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
    return (0.5 * wide * torch.erfc(wide * -math.sqrt(0.5))).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """In at least float32, as torch computes."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
