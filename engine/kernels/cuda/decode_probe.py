"""Shows, before a GPU is trusted with it, that decode and prefill give the same bits although their tiles differ."""

import functools
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cuda.attention import attend_paged
from engine.kernels.cuda.attention_plan import SPLIT, Layer, Plan, Tile, decode_tile, prefill_tile

__all__ = ["is_decode_exact"]

_LENGTHS = (1, 63, 64, 300, 2 * SPLIT, 1001)
_NUM_BLOCKS = 64
_BLOCK_SIZE = 16


@functools.cache
def is_decode_exact(layer: Layer) -> bool:
    """Whether the tiles of decode and of prefill give the same bits for such a layer. Tensor cores may have other
    instructions for them, so both attend over random numbers once."""
    decode, prefill = decode_tile(layer), prefill_tile(layer)
    if layer.device.type != "cuda" or decode == prefill:
        return True
    return torch.equal(_attend_random(layer, decode), _attend_random(layer, prefill))


def _attend_random(layer: Layer, tile: Tile) -> Tensor:
    """Returns the results [S, heads, size of a value] of a token of each of some sequences, the same for each tile."""
    generator = torch.Generator(layer.device).manual_seed(0)
    numbers: Any = {"device": layer.device, "dtype": layer.dtype, "generator": generator}
    integers: Any = {"device": layer.device, "dtype": torch.int32}
    num_seqs = len(_LENGTHS)
    query = torch.randn(num_seqs, layer.num_heads, layer.size, **numbers)
    shape = _NUM_BLOCKS, layer.num_kv_heads, _BLOCK_SIZE
    keys, values = (torch.randn(*shape, size, **numbers) for size in (layer.size, layer.size_v))
    return attend_paged(
        query,
        keys,
        values,
        torch.arange(_NUM_BLOCKS, **integers).expand(num_seqs, -1),
        torch.arange(num_seqs + 1, **integers),
        torch.tensor(_LENGTHS, **integers),
        max(_LENGTHS),
        Plan.of(layer, tile, num_seqs, num_seqs, 1),
        layer.size**-0.5,
    )
