"""Attention of groups of heads to chosen blocks of positions, in the order of positions.

A block has as many positions as the choice says, counted from the beginning of each sequence. Attention of a token and
a group of heads is that of a sequence of its own, in a cache whose blocks are of one head each, and are cut so that a
chosen one is made of whole ones: any backend can read that.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams

__all__ = ["HeadGroups", "attend_in_groups", "num_seen", "table_of"]

Attend = Callable[[Tensor, LayerCache, AttentionMetadata, AttentionParams], Tensor]


class HeadGroups(NamedTuple):
    """Groups of heads of a token, each of which attends to blocks of its own."""

    number: int
    block_size: int
    """Positions of a chosen block."""


def attend_in_groups(
    attend: Attend,
    query: Tensor,
    groups: HeadGroups,
    cache: LayerCache,
    chosen: AttentionMetadata,
    params: AttentionParams,
) -> Tensor:
    """Returns attention [num_tokens, num_heads, head_size_v] of `query` [num_tokens, num_heads, head_size] to what is
    `chosen`, where the groups of a token follow one another; `attend` is a backend's `paged_attention`."""
    num_tokens, num_heads, size = query.shape
    queries = query.reshape(num_tokens * groups.number, num_heads // groups.number, size)
    return attend(queries, _by_head(cache, groups.block_size), chosen, params).view(num_tokens, num_heads, -1)


def table_of(chosen: Tensor, block_size: int, table: Tensor, context_len: int, cache: LayerCache) -> Tensor:
    """Returns where the positions of chosen blocks [T, groups, blocks] lie in the cache, whose blocks are cut
    `_by_head`, as a block table of each group: [T * groups, num_cut] int32. What it says of unseen ones is void."""
    num_heads, num_groups, size = cache.keys.shape[1], chosen.shape[1], _cut_size(block_size, cache)
    cuts = chosen[..., None] * (block_size // size) + torch.arange(block_size // size)  # of each sequence
    cuts = cuts.flatten(2).clamp(max=(context_len - 1) // size)
    heads = torch.arange(num_groups)[:, None] // (num_groups // num_heads)
    cuts_of_block = cache.block_size // size
    blocks, offsets = table.long()[cuts // cuts_of_block], cuts % cuts_of_block
    return ((blocks * num_heads + heads) * cuts_of_block + offsets).flatten(0, 1).int()


def num_seen(chosen: Tensor, block_size: int, positions: Tensor) -> Tensor:
    """Returns how many positions of its chosen blocks [T, groups, blocks] each token at `positions` [T] sees, all but
    those behind it in its own: [T * groups] int32."""
    own = (positions // block_size)[:, None, None]
    num_whole, has_own = (chosen < own).sum(-1), (chosen == own).any(-1)
    return (num_whole * block_size + has_own * (positions % block_size + 1)[:, None]).flatten().int()


def _by_head(cache: LayerCache, block_size: int) -> LayerCache:
    """Returns the cache as one of a single head: each block is one of each head, and is cut so that chosen blocks of so
    many positions are made of whole ones."""
    size = _cut_size(block_size, cache)
    return LayerCache(*(each.view(-1, 1, size, each.shape[3]) for each in cache))


def _cut_size(block_size: int, cache: LayerCache) -> int:
    return math.gcd(block_size, cache.block_size)
