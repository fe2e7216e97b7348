"""Warm-up of MKL's vector functions, so that exp, cos and others give the same results in the first call as in all
later ones.

On x86 CPUs torch computes these functions with MKL, each thread its share of a tensor. At a function's first call MKL
chooses the code for this CPU, and in some versions (2024.2, with which torch's wheels are built) without a lock: of two
threads that come at once, one may compute its share with code of low accuracy, that one time. Errors of 1e-4 were seen
in half a tensor, in one of 600 processes. So each function's first call must be made by one thread alone.
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
"""Functions of torch that MKL computes, in float32 and float64."""


def warm_up_vector_functions() -> None:
    """Calls each of the functions once. Call this before threads share any of them."""
    for dtype in (torch.float32, torch.float64):
        one_element = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one_element)
