"""The operators of fused layers under the names that the C++ library has for them, for tensors on the GPU."""

import functools

import torch

from engine.kernels.cuda import layers

__all__ = ["IMPLEMENTATIONS", "register"]

_OPERATORS = {
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor": layers.rms_norm,
    "add_rms_norm(Tensor residual, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)": layers.add_rms_norm,
    "add_segments_rms_norm(Tensor residual, Tensor segments, Tensor? bias, Tensor weight, float eps) "
    "-> (Tensor, Tensor)": layers.add_segments_rms_norm,
    "rotate_heads(Tensor(a!) qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads, Tensor? query_norm, "
    "Tensor? key_norm, float eps, bool in_pairs=False, bool norms_last=False, Tensor? query_scales=None) -> ()": (
        layers.rotate_heads
    ),
    "gate(Tensor gate_up, str activation) -> Tensor": layers.gate,
    "rotary_tables(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype) -> (Tensor, Tensor)": (
        layers.rotary_tables
    ),
}

IMPLEMENTATIONS = {schema.partition("(")[0]: function for schema, function in _OPERATORS.items()}
"""The functions that compute the operators, by name."""


@functools.cache
def register(dispatch_key: str = "CUDA") -> torch.library.Library:
    """Registers the operators with torch, once per process and key; defines those that the C++ library has not.

    They stay as long as the result does, which is kept.
    """
    library = torch.library.Library("twostep", "FRAGMENT")
    for schema, (name, function) in zip(_OPERATORS, IMPLEMENTATIONS.items(), strict=True):
        if not hasattr(torch.ops.twostep, name):
            library.define(schema)
        library.impl(name, function, dispatch_key)
    return library
