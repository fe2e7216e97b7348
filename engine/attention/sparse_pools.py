"""Sparse attention to pools of positions (GLM-5.3, Qwen 4): a token attends to those pools that it sees whole whose
keys score best, and to its own as far as it goes.

A pool has an index key when its last position is computed, made of what is kept of its positions. A row of the cache
has what is kept of a position, and that of a pool's last position the pool's key in place of the first numbers, which
nothing reads any more: one that is computed again is written again. What is chosen is attended to as
`engine.attention.chosen_blocks` says.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import chosen_blocks
from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, IndexCall, PoolIndexCall

__all__ = ["attending_to_pools", "groups_of", "mean_of", "sees_all_pools", "weighed_by_gates", "write_pool_keys"]

ChooseSlots = Callable[[IndexCall, Tensor, AttentionMetadata], Tensor]


def sees_all_pools(index: PoolIndexCall, metadata: AttentionMetadata) -> bool:
    """Whether every token attends to all that it sees."""
    return metadata.max_context_len // index.pool_size <= index.num_pools


def groups_of(index: PoolIndexCall, cache: LayerCache) -> chosen_blocks.HeadGroups:
    """Returns the groups of heads that read a key and a value of their own; all choose the same."""
    return chosen_blocks.HeadGroups(cache.keys.shape[1], index.pool_size)


def write_pool_keys(index: PoolIndexCall, cache: Tensor, metadata: AttentionMetadata) -> None:
    """Stores the keys of pools that this step completes in `cache` [num_blocks, block_size, size], in place, which has
    what is kept of this step's tokens already."""
    rows, size = cache.view(-1, cache.shape[2]), index.pool_size
    for table, length, context_len in _sequences(metadata):
        first, end = (context_len - length) // size, context_len // size
        if first == end:
            continue
        slots = _slots_of(table, torch.arange(first * size, end * size), cache.shape[1])
        keys = index.pool_keys(rows[slots].view(end - first, size, -1), torch.arange(first, end) * size)
        rows[slots[size - 1 :: size], : keys.shape[-1]] = keys


def attending_to_pools(
    index: PoolIndexCall, choose_slots: ChooseSlots, keys: Tensor, metadata: AttentionMetadata, cache: LayerCache
) -> AttentionMetadata:
    """Returns what has each group of heads of each token, those that read one key, attend to its pools, see
    `chosen_blocks.attend_in_groups`; `keys` [num_blocks, block_size, size] are what the layer keeps, and `choose_slots`
    is a backend's."""
    tables, counts, start = [], [], 0
    for table, length, context_len in _sequences(metadata):
        positions, own = torch.arange(context_len - length, context_len), slice(start, start + length)
        choice = IndexCall(index.query[own], index.key, index.weights[own], index.layer, index.num_pools)
        pools = _choose_pools(choice, choose_slots, _pool_keys(index, keys, table, context_len), positions, index)
        of_groups = _with_own(pools, positions, index)[:, None].expand(-1, cache.keys.shape[1], -1)
        tables.append(chosen_blocks.table_of(of_groups, index.pool_size, table, context_len, cache))
        counts.append(chosen_blocks.num_seen(of_groups, index.pool_size, positions))
        start += length
    return metadata.of_single_queries(torch.cat(tables), torch.cat(counts), index.num_chosen)


def weighed_by_gates(kept: Tensor, position_gates: Tensor) -> Tensor:
    """Returns the keys [pools, index_size] of pools whose positions have a key, and then a gate, [pools, size,
    2 * index_size]: sums of the keys, each number weighed by a softmax of the gates, to which `position_gates` [size,
    index_size] add. Sums are in the order of positions, whatever the number of pools is."""
    keys, gates = kept.chunk(2, dim=-1)
    logits = gates.float() + position_gates.float()
    powers = torch.exp(logits - logits.amax(1, keepdim=True))
    shares = (powers / _sum_of(powers)[:, None]).to(keys.dtype)
    return _sum_of((shares * keys).float()).to(keys.dtype)


def mean_of(kept: Tensor) -> Tensor:
    """Returns the mean [pools, index_size] of the keys [pools, size, index_size] of positions, summed in their order in
    float32."""
    return (_sum_of(kept.float()) / kept.shape[1]).to(kept.dtype)


def _sum_of(terms: Tensor) -> Tensor:  # [pools, size, index_size] -> [pools, index_size]
    first, *others = terms.unbind(1)
    return sum(others, start=first)


def _pool_keys(index: PoolIndexCall, keys: Tensor, table: Tensor, context_len: int) -> Tensor:
    """Returns the keys [num_pools, index_size] of all whole pools of a sequence."""
    last = torch.arange(1, context_len // index.pool_size + 1) * index.pool_size - 1
    return keys.view(-1, keys.shape[2])[_slots_of(table, last, keys.shape[1])][:, : index.query.shape[2]]


def _choose_pools(
    choice: IndexCall, choose_slots: ChooseSlots, keys: Tensor, positions: Tensor, index: PoolIndexCall
) -> Tensor:
    """Returns the pools [T, num_pools] that tokens at `positions` choose among those of `keys`, in their order; behind
    those of a token that sees fewer stands anything."""
    if not len(keys):
        return torch.zeros(len(positions), index.num_pools, dtype=torch.long)
    num_whole = ((positions + 1) // index.pool_size).clamp(min=1).int()  # of none, any is chosen, and not attended to
    tables = torch.arange(len(keys), dtype=torch.int32).expand(len(positions), -1).contiguous()
    numbers = torch.arange(len(positions) + 1, dtype=torch.int32)
    metadata = AttentionMetadata(tables, numbers, num_whole, positions, 1, len(keys))
    return choose_slots(choice, keys[:, None].contiguous(), metadata).long()


def _with_own(pools: Tensor, positions: Tensor, index: PoolIndexCall) -> Tensor:
    """Returns the pools [T, num_pools + 1] that tokens at `positions` attend to: chosen ones [T, num_pools], and their
    own if it goes on behind them. Behind these stands a number that no pool has."""
    num_whole = ((positions + 1) // index.pool_size)[:, None]
    places, num_chosen = torch.arange(index.num_pools + 1), num_whole.clamp(max=index.num_pools)
    has_part = ((positions + 1) % index.pool_size > 0)[:, None]
    unseen = int(positions[-1]) + 1
    behind = torch.where((places == num_chosen) & has_part, num_whole, unseen)
    return torch.where(places < num_chosen, functional.pad(pools, (0, 1)), behind)


def _sequences(metadata: AttentionMetadata) -> list[tuple[Tensor, int, int]]:
    """Returns of each sequence its block table, the number of this step's tokens and the length of its context."""
    lengths, contexts = metadata.cu_seqlens_q.diff().tolist(), metadata.context_lens.tolist()
    return [*zip(metadata.block_tables, lengths, contexts, strict=True)]


def _slots_of(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return table.long()[positions // block_size] * block_size + positions % block_size
