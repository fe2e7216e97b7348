"""Block-sparse attention: groups of heads attend to those blocks of positions whose index keys score best (MiniMax-M3).

A block's score is that of its best position, query . key, and the blocks next to the token's own are chosen before all
others. Torch multiplies in tiles of a fixed size, so that a score does not depend on the rest of the batch. What is
chosen is attended to as `engine.attention.chosen_blocks` says.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import chosen_blocks
from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, BlockIndexCall

__all__ = ["attending_to_blocks", "choose_blocks", "groups_of"]

_TILE_ROWS = 16  # queries of one matmul, of all index heads of some tokens
_TILE_KEYS = 512  # and about as many keys, in whole blocks


def attending_to_blocks(
    index: BlockIndexCall, keys: Tensor, metadata: AttentionMetadata, cache: LayerCache
) -> AttentionMetadata:
    """Returns what has each group of heads of each token attend to its blocks, see
    `chosen_blocks.attend_in_groups`; `keys` [num_blocks, block_size, index_size] are the index keys of the layer."""
    lengths, groups = metadata.cu_seqlens_q.diff().tolist(), groups_of(index, cache).number
    tables, counts = [], []
    contexts = zip(metadata.block_tables, metadata.context_lens.tolist(), strict=True)
    for queries, (table, context_len) in zip(index.query.split_with_sizes(lengths), contexts, strict=True):
        positions = torch.arange(context_len - len(queries), context_len)
        own_keys = keys[table[: -(-context_len // keys.shape[1])].long()].flatten(0, 1)[:context_len]
        chosen = choose_blocks(index, queries, own_keys, positions)
        chosen = chosen.repeat_interleave(groups // chosen.shape[1], dim=1)  # [T, groups, blocks]
        tables.append(chosen_blocks.table_of(chosen, index.block_size, table, context_len, cache))
        counts.append(chosen_blocks.num_seen(chosen, index.block_size, positions))
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


def groups_of(index: BlockIndexCall, cache: LayerCache) -> chosen_blocks.HeadGroups:
    """Returns the groups of heads that choose for themselves, or read a key and a value of their own."""
    return chosen_blocks.HeadGroups(max(index.query.shape[1], cache.keys.shape[1]), index.block_size)
