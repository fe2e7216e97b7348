"""Launches of every kernel between matmuls, for models of several sizes; they are compiled, not run."""

import torch

from engine.kernels.cuda import layers


def launch_all() -> None:
    """Launches each kernel in each of its configurations: sizes that are powers of two and others, all dtypes."""
    for size in (2880, 4096, 16384):
        _launch_norms(size, torch.bfloat16)
    _launch_rotations(32, 8, 80, torch.bfloat16)
    _launch_gate(4864, "silu", torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        _launch_norms(4096, dtype)
        _launch_rotations(32, 8, 128, dtype)
        _launch_gate(100, "gelu_tanh", dtype)


def _launch_norms(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(2, size, dtype=dtype), torch.ones(size, dtype=dtype)
    layers.rms_norm(x, weight, 1e-5)
    layers.add_rms_norm(x, x, weight, 1e-5)
    most = 8 if dtype.itemsize == 2 else 4  # in float32 a compiler for 10.0 keeps a pointer of eight segments in memory
    for num_segments, bias in ((2, weight), (most, None)):
        layers.add_segments_rms_norm(x, torch.zeros(num_segments, 2, size), bias, weight, 1e-5)


def _launch_rotations(num_heads: int, num_kv_heads: int, size: int, dtype: torch.dtype) -> None:
    qkv = torch.zeros(2, (num_heads + 2 * num_kv_heads) * size, dtype=dtype)
    angles, weight = torch.zeros(2, size, dtype=dtype), torch.ones(size, dtype=dtype)
    layers.rotary_tables(torch.zeros(2, dtype=torch.int64), torch.zeros(size // 2), 1.0, dtype)
    for norms in ((None, None), (weight, weight)):
        layers.rotate_heads(qkv, angles, angles, num_heads, num_kv_heads, *norms, 1e-5)


def _launch_gate(size: int, activation: str, dtype: torch.dtype) -> None:
    layers.gate(torch.zeros(2, 2 * size, dtype=dtype), activation)
