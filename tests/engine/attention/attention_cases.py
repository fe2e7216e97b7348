"""Test cases of attention for this CPU's backends: head shapes, options, and lengths of queries and contexts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionBackend, cpu, reference
from engine.kernels import load_kernels
from tests.engine.attention.paged_sequences import Sequence, Shape, make_sequence

BF16 = torch.bfloat16
SHAPES = {
    "grouped": Shape(heads=14, kv_heads=2, size=64, value_size=64),
    "odd_sizes": Shape(heads=2, kv_heads=1, size=7, value_size=5),
    "multi_query": Shape(heads=7, kv_heads=1, size=8, value_size=8),
    "one_key_head_each": Shape(heads=3, kv_heads=3, size=12, value_size=12),
    "size_one": Shape(heads=2, kv_heads=2, size=1, value_size=1),
    "values_smaller": Shape(heads=2, kv_heads=2, size=192, value_size=128),
    "values_larger": Shape(heads=4, kv_heads=2, size=80, value_size=96),
    "last_vector_not_full": Shape(heads=7, kv_heads=1, size=60, value_size=60),
    "group_beyond_a_task": Shape(heads=70, kv_heads=1, size=16, value_size=16),
    "latent": Shape(heads=9, kv_heads=1, size=272, value_size=256, is_latent=True),
}
QUANTIZED = {"int8": torch.int8, "int4": torch.uint8}
QUANTIZABLE = {name: s for name, s in SHAPES.items() if s.size % 16 == s.value_size % 16 == 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 37},
    "window_of_one": {"sliding_window": 1},
    "window_of_a_tile": {"sliding_window": 64},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 100, "softcap": 5.0, "sinks": True},
}
BLOCK_SIZES = (1, 4, 16, 24, 32, 128)
# [num queries, context]: decode and prefill, below, at and above a tile (64) and a split (512) of positions.
LENGTHS = ((1, 1), (1, 64), (1, 65), (3, 3), (70, 70), (1, 513), (20, 530), (1, 1100))
SHORT_LENGTHS = ((1, 1), (1, 65), (3, 3), (20, 70), (1, 130))  # the reference is slow, and knows no splits


def named_backend(name: str) -> AttentionBackend:
    return reference if name == "reference" else kernel_backend()


def sequences_for(backend: AttentionBackend, shape: Shape) -> list[Sequence]:
    return [make_sequence(shape, *lengths) for lengths in (SHORT_LENGTHS if backend is reference else LENGTHS)]


def kernel_backend() -> AttentionBackend:
    if load_kernels() is None:
        pytest.skip("no kernels")
    return cpu


def with_sinks(options: dict[str, Any], shape: Shape) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 5, shape.heads)} if options.get("sinks") else options


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {torch.float32: torch.int32, BF16: torch.int16}[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
