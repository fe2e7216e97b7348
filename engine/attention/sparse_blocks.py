"""Block-sparse attention: groups of heads attend to those blocks of positions whose index keys score best (MiniMax-M3).

A block's score is that of its best position, query . key, and the blocks next to the token's own are chosen before all
others. Torch multiplies in tiles of a fixed size, so that a score does not depend on the rest of the batch. What is
chosen is attended to in the order of positions: attention of a token and a group of heads is that of a sequence of its
own, in a cache whose blocks are of one head each.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams, BlockIndexCall

__all__ = ["attend_in_groups", "attending_to_blocks", "choose_blocks"]

_TILE_ROWS = 16  # queries of one matmul, of all index heads of some tokens
_TILE_KEYS = 512  # and about as many keys, in whole blocks


Attend = Callable[[Tensor, LayerCache, AttentionMetadata, AttentionParams], Tensor]


def attend_in_groups(
    attend: Attend,
    query: Tensor,
    index: BlockIndexCall,
    cache: LayerCache,
    chosen: AttentionMetadata,
    params: AttentionParams,
) -> Tensor:
    """Returns attention [num_tokens, num_heads, head_size_v] of `query` [num_tokens, num_heads, head_size] to what is
    `chosen`; `attend` is a backend's `paged_attention`."""
    num_tokens, num_heads, size = query.shape
    num_groups = _num_groups(index, cache)
    groups = query.reshape(num_tokens * num_groups, num_heads // num_groups, size)
    return attend(groups, _by_head(cache, index.block_size), chosen, params).view(*query.shape[:2], -1)


def attending_to_blocks(
    index: BlockIndexCall, keys: Tensor, metadata: AttentionMetadata, cache: LayerCache
) -> AttentionMetadata:
    """Returns what has each group of heads of each token attend to its blocks, see `attend_in_groups`; `keys`
    [num_blocks, block_size, index_size] are the index keys of the layer. The groups of a token follow one another."""
    lengths, groups = metadata.cu_seqlens_q.diff().tolist(), _num_groups(index, cache)
    tables, counts = [], []
    contexts = zip(metadata.block_tables, metadata.context_lens.tolist(), strict=True)
    for queries, (table, context_len) in zip(index.query.split_with_sizes(lengths), contexts, strict=True):
        positions = torch.arange(context_len - len(queries), context_len)
        own_keys = keys[table[: -(-context_len // keys.shape[1])].long()].flatten(0, 1)[:context_len]
        chosen = choose_blocks(index, queries, own_keys, positions)
        chosen = chosen.repeat_interleave(groups // chosen.shape[1], dim=1)  # [T, groups, blocks]
        tables.append(_table_of(chosen, index.block_size, table, context_len, cache))
        counts.append(_num_seen(chosen, index.block_size, positions))
    return metadata.of_single_queries(torch.cat(tables), torch.cat(counts), index.num_chosen)


def choose_blocks(index: BlockIndexCall, queries: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Chooses `index.num_blocks` of the blocks that each token sees any position of, for each index head.

    queries: [T, heads, size] of the tokens at `positions` [T]; keys: [context, size]. Of equal scores the earlier block
    is chosen; in torch's `topk` any is. Returns blocks [T, heads, num_blocks] in their order; behind those of tokens
    that see fewer stands the number of all.
    """
    num_tokens, num_heads, _ = queries.shape
    scores = _block_scores(queries.flatten(0, 1), keys, positions.repeat_interleave(num_heads), index.block_size)
    num_all = scores.shape[1]
    distance = (positions // index.block_size)[:, None] - torch.arange(num_all)  # [T, all blocks]
    is_near = (distance >= 0) & (distance < index.num_near)
    scores = scores.view(num_tokens, num_heads, num_all).masked_fill(is_near[:, None], torch.inf)
    best, blocks = scores.sort(dim=-1, descending=True, stable=True)
    blocks = blocks.masked_fill(best == -torch.inf, num_all)[..., : index.num_blocks].sort(dim=-1).values
    return functional.pad(blocks, (0, index.num_blocks - blocks.shape[-1]), value=num_all)


def _block_scores(queries: Tensor, keys: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Scores of blocks by queries [rows, size] at `positions` [rows], in whose order they are: [rows, num_blocks], -inf
    of blocks behind."""
    blocks_of_tile = max(1, _TILE_KEYS // block_size)
    tile = blocks_of_tile * block_size
    padded_keys = functional.pad(keys, (0, 0, 0, -len(keys) % tile))
    padded_rows = functional.pad(queries.float(), (0, 0, 0, -len(queries) % _TILE_ROWS))
    scores = torch.full((len(queries), len(padded_keys) // block_size), -torch.inf)
    for begin in range(0, int(positions[-1]) + 1, tile):
        block, keys_of_tile = begin // block_size, padded_keys[begin : begin + tile].float()
        for first in range(0, len(queries), _TILE_ROWS):
            own = positions[first : first + _TILE_ROWS]
            if int(own[-1]) < begin:
                continue
            products = functional.linear(padded_rows[first : first + _TILE_ROWS], keys_of_tile)[: len(own)]
            if int(own[0]) < begin + tile - 1:
                products.masked_fill_(torch.arange(begin, begin + tile) > own[:, None], -torch.inf)
            best = products.view(len(own), blocks_of_tile, block_size).amax(-1)
            scores[first : first + len(own), block : block + blocks_of_tile] = best
    return scores[:, : -(-len(keys) // block_size)]


def _table_of(chosen: Tensor, block_size: int, table: Tensor, context_len: int, cache: LayerCache) -> Tensor:
    """Returns where the positions of chosen blocks [T, groups, blocks] lie in the cache, whose blocks are cut
    `_by_head`, as a block table of each group: [T * groups, num_cut] int32. What it says of unseen ones is void."""
    num_heads, num_groups, size = cache.keys.shape[1], chosen.shape[1], _cut_size(block_size, cache)
    cuts = chosen[..., None] * (block_size // size) + torch.arange(block_size // size)  # of each sequence
    cuts = cuts.flatten(2).clamp(max=(context_len - 1) // size)
    heads = torch.arange(num_groups)[:, None] // (num_groups // num_heads)
    cuts_of_block = cache.block_size // size
    blocks, offsets = table.long()[cuts // cuts_of_block], cuts % cuts_of_block
    return ((blocks * num_heads + heads) * cuts_of_block + offsets).flatten(0, 1).int()


def _num_seen(chosen: Tensor, block_size: int, positions: Tensor) -> Tensor:
    """Returns how many positions of its chosen blocks [T, groups, blocks] each token at `positions` [T] sees, all but
    those behind it in its own: [T * groups] int32."""
    own = (positions // block_size)[:, None, None]
    num_whole, has_own = (chosen < own).sum(-1), (chosen == own).any(-1)
    return (num_whole * block_size + has_own * (positions % block_size + 1)[:, None]).flatten().int()


def _num_groups(index: BlockIndexCall, cache: LayerCache) -> int:
    """Returns how many groups of heads choose for themselves, or read a key and a value of their own."""
    return max(index.query.shape[1], cache.keys.shape[1])


def _by_head(cache: LayerCache, block_size: int) -> LayerCache:
    """Returns the cache as one of a single head: each block is one of each head, and is cut so that chosen blocks of so
    many positions are made of whole ones."""
    size = _cut_size(block_size, cache)
    return LayerCache(*(each.view(-1, 1, size, each.shape[3]) for each in cache))


def _cut_size(block_size: int, cache: LayerCache) -> int:
    return math.gcd(block_size, cache.block_size)
