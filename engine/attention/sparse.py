"""Sparse attention: a token attends to those positions it sees whose index keys score best (DeepSeek-V3.2, 2025).

A score is the sum over index heads of weight * max(0, query . key); `AttentionBackend.choose_slots` chooses. What is
chosen is attended to in the order of positions. So attention of a token is that of a sequence of its own, in a cache
whose blocks have one position each, and whose block table is the chosen slots: any backend can read that.
"""

import torch
from torch import Tensor

from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata

__all__ = ["as_single_positions", "attending_to", "write_index_keys"]


def write_index_keys(keys: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores each token's index key [num_tokens, index_size] in its slot of the cache, in place."""
    cache.view(-1, cache.shape[2])[slot_mapping] = keys


def attending_to(slots: Tensor, metadata: AttentionMetadata) -> AttentionMetadata:
    """Returns what has each token attend to its slots [num_tokens, num_chosen], in a cache `as_single_positions`."""
    starts, num_chosen = metadata.cu_seqlens_q, slots.shape[1]
    numbers = torch.arange(1, len(slots) + 1, dtype=torch.int32, device=slots.device)
    to_position = (metadata.context_lens - starts[1:]).repeat_interleave(starts.diff())
    num_seen = numbers + to_position  # a token sees its own position, and all before it
    return metadata.of_single_queries(slots, num_seen.clamp(max=num_chosen), num_chosen)


def as_single_positions(cache: LayerCache) -> LayerCache:
    """Returns a cache of latents as one with blocks of one position each."""
    assert cache.is_latent and cache.keys.shape[1] == 1, "a position has one row"
    keys = cache.keys.view(-1, 1, 1, cache.keys.shape[3])
    return LayerCache(keys, keys[..., : cache.values.shape[3]])
