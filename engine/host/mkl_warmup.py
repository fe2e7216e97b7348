"""exp, cos and their like are the same in every call of a process, the first ones included.

On x86 CPUs torch gives these functions to MKL, each thread its share of a tensor. At a function's first call MKL
chooses the code for this CPU, and in some versions (2024.2, of which torch's wheels are made) without a lock: of two
threads that come at once, one may compute its share with code of low accuracy, that one time. Errors of 1e-4 were seen
in half a tensor, in one of 600 processes. So each function's first call is one that threads do not share.
"""

import torch

VECTOR_FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)
"""Those of torch that MKL computes, in float32 and float64."""


def settle_vector_functions() -> None:
    """Before threads share any of them."""
    for dtype in (torch.float32, torch.float64):
        one_element = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one_element)
