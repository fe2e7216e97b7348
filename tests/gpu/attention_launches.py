"""Launches of paged attention in the shapes of known models; they are compiled, not run."""

from typing import NamedTuple

import torch
from triton.runtime import driver

from engine.kernels.cuda import attention_plan
from engine.kernels.cuda.attention import attend_paged, write_rows
from engine.kernels.cuda.attention_plan import Layer, Plan, decode_tile, prefill_tile
from engine.kernels.cuda.decode_probe import random_rows
from tests.gpu.cross_compile import SHARED_KIB


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    size: int
    size_v: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    kv_bits: int = 0
    is_latent: bool = False

    @property
    def layer(self) -> Layer:
        sizes = self.heads, self.kv_heads, self.size, self.size_v
        return Layer(torch.device("cpu"), self.dtype, *sizes, self.kv_bits, self.is_latent)


SHAPES = (
    Shape(32, 8, 128, 128),
    Shape(14, 2, 64, 64, torch.float16),
    Shape(64, 8, 64, 64, window=128, has_sinks=True),
    Shape(16, 16, 192, 128),
    Shape(8, 4, 256, 256, window=4096, softcap=50.0),
    Shape(4, 4, 20, 10),
    Shape(32, 8, 128, 128, torch.float32),
    Shape(16, 1, 576, 512, is_latent=True),
    Shape(128, 1, 576, 512, is_latent=True, kv_bits=8),
    Shape(32, 8, 128, 128, kv_bits=8),
    Shape(32, 8, 128, 128, kv_bits=4),
    Shape(64, 8, 64, 64, torch.float16, window=128, has_sinks=True, kv_bits=8),
    Shape(4, 4, 80, 48, kv_bits=4),
    Shape(32, 8, 128, 128, torch.float32, kv_bits=8),
)


def launch_all() -> None:
    """Launches attention with the tiles of decode, whose splits several programs share, and of prefill."""
    attention_plan.shared_bytes = lambda _: SHARED_KIB[driver.active.get_current_device()] << 10
    for shape in SHAPES:
        layer = shape.layer
        for tile, num_tokens, num_parts in ((decode_tile(layer), 2, 2), (prefill_tile(layer), 6, 1)):
            _launch(shape, Plan.of(layer, tile, num_tokens, 2, num_parts), num_tokens)


def _launch(shape: Shape, plan: Plan, num_tokens: int) -> None:
    query = torch.zeros(num_tokens, shape.heads, shape.size, dtype=shape.dtype)
    key, value = (torch.zeros(16, shape.kv_heads, size, dtype=shape.dtype) for size in (shape.size, shape.size_v))
    keys, values = random_rows(shape.layer, 9, 16, torch.Generator())
    tables, starts, lengths = (torch.zeros(*size, dtype=torch.int32) for size in ((2, 40), (3,), (2,)))
    sinks = torch.zeros(shape.heads) if shape.has_sinks else None
    limits = (shape.size**-0.5, shape.window, shape.softcap, sinks)
    attend_paged(query, keys, values, tables, starts, lengths, 600, plan, *limits)
    write_rows(key, value, keys, values, torch.zeros(16, dtype=torch.int64), shape.layer)
