"""Shows, before a GPU is trusted with it, that decode and prefill give the same bits although their tiles differ."""

import functools
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cuda.attention import attend_paged
from engine.kernels.cuda.attention_plan import SPLIT, Layer, Plan, Tile, decode_tile, prefill_tile

__all__ = ["is_decode_exact", "random_rows"]

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
    integers: Any = {"device": layer.device, "dtype": torch.int32}
    num_seqs = len(_LENGTHS)
    query = torch.empty(num_seqs, layer.num_heads, layer.size, device=layer.device, dtype=layer.dtype)
    keys, values = random_rows(layer, _NUM_BLOCKS, _BLOCK_SIZE, generator)
    return attend_paged(
        query.normal_(generator=generator),
        keys,
        values,
        torch.arange(_NUM_BLOCKS, **integers).expand(num_seqs, -1),
        torch.arange(num_seqs + 1, **integers),
        torch.tensor(_LENGTHS, **integers),
        max(_LENGTHS),
        Plan.of(layer, tile, num_seqs, num_seqs, 1),
        layer.size**-0.5,
    )


def random_rows(layer: Layer, num_blocks: int, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns paged keys and values of such a layer with random numbers."""
    keys, values = (
        torch.empty(num_blocks, layer.num_kv_heads, block_size, size, dtype=layer.cache_dtype, device=layer.device)
        for size in layer.row_sizes
    )
    for rows, size in ((keys, layer.size), (values, layer.size_v)):
        if layer.kv_bits:
            rows.view(torch.uint8).random_(0, 256, generator=generator)
            rows[..., size * layer.kv_bits // 8 :].view(torch.bfloat16).normal_(0.0, 0.01, generator=generator)
        else:
            rows.normal_(generator=generator)
    return keys, keys[..., : values.shape[3]] if layer.is_latent else values
