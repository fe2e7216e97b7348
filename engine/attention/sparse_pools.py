"""Sparse attention to pools of positions (GLM-5.3): a token attends to those pools that it sees whole whose keys score
best, and to its own as far as it goes.

A pool has an index key when its last position is computed: the sum of its positions' keys, weighed by a softmax of
their gates in each number. A row of the cache has a position's key and gate, and that of a pool's last position the
pool's key in place of its own, which nothing reads any more: one that is computed again is written again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention.metadata import AttentionMetadata, IndexCall, PoolIndexCall

__all__ = ["attending_to_pools", "sees_all_pools", "write_pool_keys"]

ChooseSlots = Callable[[IndexCall, Tensor, AttentionMetadata], Tensor]


def sees_all_pools(index: PoolIndexCall, metadata: AttentionMetadata) -> bool:
    """Whether every token attends to all that it sees."""
    return metadata.max_context_len // index.pool_size <= index.num_pools


def write_pool_keys(index: PoolIndexCall, cache: Tensor, metadata: AttentionMetadata) -> None:
    """Stores the keys of pools that this step completes in `cache` [num_blocks, block_size, 2 * index_size], in place,
    which has keys and gates of this step's tokens already."""
    rows, size = cache.view(-1, cache.shape[2]), index.pool_size
    for table, length, context_len in _sequences(metadata):
        first, end = (context_len - length) // size, context_len // size
        if first == end:
            continue
        slots = _slots_of(table, torch.arange(first * size, end * size), cache.shape[1])
        keys, gates = rows[slots].view(end - first, size, 2, -1).unbind(2)  # [pools, size, index_size]
        rows[slots[size - 1 :: size], : keys.shape[-1]] = _pooled(keys, gates, index.position_gates)


def attending_to_pools(
    index: PoolIndexCall, choose_slots: ChooseSlots, cache: Tensor, metadata: AttentionMetadata
) -> AttentionMetadata:
    """Returns what has each token attend to its pools, in a cache `as_single_positions`; `choose_slots` is a
    backend's."""
    slots, counts, start = [], [], 0
    for table, length, context_len in _sequences(metadata):
        positions = torch.arange(context_len - length, context_len)
        end = start + length
        own = IndexCall(index.query[start:end], index.key, index.weights[start:end], index.layer, index.num_pools)
        chosen = _choose_pools(own, choose_slots, _pool_keys(index, cache, table, context_len), positions, index)
        of_tokens, num_seen = _positions_of(chosen, positions, index)
        slots.append(_slots_of(table, of_tokens, cache.shape[1]))
        counts.append(num_seen)
        start = end
    return metadata.of_single_queries(torch.cat(slots), torch.cat(counts), index.num_chosen)


def _pooled(keys: Tensor, gates: Tensor, position_gates: Tensor) -> Tensor:
    """Returns the keys [pools, index_size] of pools of keys and gates [pools, size, index_size]. Sums are in the order
    of positions, whatever the number of pools is."""
    logits = gates.float() + position_gates.float()
    powers = torch.exp(logits - logits.amax(1, keepdim=True))
    shares = (powers / _sum_of(powers)[:, None]).to(keys.dtype)
    return _sum_of((shares * keys).float()).to(keys.dtype)


def _sum_of(terms: Tensor) -> Tensor:  # [pools, size, index_size] -> [pools, index_size]
    first, *others = terms.unbind(1)
    return sum(others, start=first)


def _pool_keys(index: PoolIndexCall, cache: Tensor, table: Tensor, context_len: int) -> Tensor:
    """Returns the keys [num_pools, index_size] of all whole pools of a sequence."""
    last = torch.arange(1, context_len // index.pool_size + 1) * index.pool_size - 1
    return cache.view(-1, cache.shape[2])[_slots_of(table, last, cache.shape[1])][:, : cache.shape[2] // 2]


def _choose_pools(
    own: IndexCall, choose_slots: ChooseSlots, keys: Tensor, positions: Tensor, index: PoolIndexCall
) -> Tensor:
    """Returns the pools [T, num_pools] that tokens at `positions` choose among those of `keys`, in their order; behind
    those of a token that sees fewer stands anything."""
    if not len(keys):
        return torch.zeros(len(positions), index.num_pools, dtype=torch.long)
    num_seen = ((positions + 1) // index.pool_size).clamp(min=1).int()  # of none, any is chosen, and not attended to
    tables = torch.arange(len(keys), dtype=torch.int32).expand(len(positions), -1).contiguous()
    numbers = torch.arange(len(positions) + 1, dtype=torch.int32)
    metadata = AttentionMetadata(tables, numbers, num_seen, positions, 1, len(keys))
    return choose_slots(own, keys[:, None].contiguous(), metadata).long()


def _positions_of(pools: Tensor, positions: Tensor, index: PoolIndexCall) -> tuple[Tensor, Tensor]:
    """Returns the positions [T, num_chosen] of a token's pools and of what is behind all whole ones, and how many these
    are [T]."""
    size = index.pool_size
    num_whole = (positions + 1) // size
    num_pooled = num_whole.clamp(max=pools.shape[1])[:, None] * size
    places = torch.arange(index.num_chosen).expand(len(positions), -1)
    of_pools = pools.gather(1, (places // size).clamp(max=pools.shape[1] - 1)) * size + places % size
    behind = num_whole[:, None] * size + places - num_pooled
    chosen = torch.where(places < num_pooled, of_pools, behind)
    num_seen = num_pooled[:, 0] + (positions + 1) % size
    return torch.minimum(chosen, positions[:, None]), num_seen


def _sequences(metadata: AttentionMetadata) -> list[tuple[Tensor, int, int]]:
    """Returns of each sequence its block table, the number of this step's tokens and the length of its context."""
    lengths, contexts = metadata.cu_seqlens_q.diff().tolist(), metadata.context_lens.tolist()
    return [*zip(metadata.block_tables, lengths, contexts, strict=True)]


def _slots_of(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return table.long()[positions // block_size] * block_size + positions % block_size
