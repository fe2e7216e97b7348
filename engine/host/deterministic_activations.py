"""Batch-invariant silu, sigmoid, gelu and softplus for CPUs without the C++ kernels.

Torch's own activations compute the last elements of a thread's share in another way than the rest, so their results
differ in the last bit with the number of rows. Torch's arithmetic does not, nor do exp, erfc and tanh once they are
warmed up (`engine.host.mkl_warmup`): these activations are made of them. erf is not used: on ARM it differs in float32.
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
    """Replaces torch's activations on CPU tensors, process-wide and for good; returns the library that keeps them
    so."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel of its own is replaced, as is intended here
        library.impl("sigmoid", _sigmoid, "CPU")
        library.impl("sigmoid_", lambda x: x.copy_(_sigmoid(x)), "CPU")
        library.impl("silu", _silu, "CPU")
        library.impl("silu_", lambda x: x.copy_(_silu(x)), "CPU")
        library.impl("gelu", _gelu, "CPU")
        library.impl("gelu_", lambda x, approximate="none": x.copy_(_gelu(x, approximate)), "CPU")
        library.impl("softplus", _softplus, "CPU")
    return library


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + e) / beta with e = exp(beta x), in float64. Where e is small, 1 + e would lose it, and the logarithm is e
    itself."""
    wide = x.double() * beta
    power = torch.exp(wide.clamp(max=threshold))
    result = torch.where(wide < -18.0, power, torch.log(1.0 + power))
    return (torch.where(wide > threshold, wide, result) / beta).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return (1.0 / (1.0 + torch.exp(-_at_least_float32(x)))).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    wide = _at_least_float32(x)
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    wide = _at_least_float32(x)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)
    return (0.5 * wide * torch.erfc(wide * -math.sqrt(0.5))).to(x.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    """Returns x in at least float32, the precision that torch computes in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
