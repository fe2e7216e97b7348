"""Sparse attention to pools of positions: which are chosen, and what is written of them."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.attention import chosen_blocks, cpu, reference, sparse_pools
from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams, PoolIndexCall
from engine.kernels import load_kernels
from tests.engine.attention.paged_sequences import scattered

NUM_HEADS, SIZE, NUM_BLOCKS, BLOCK_SIZE, POOL_SIZE = 12, 20, 80, 6, 4
CONTEXTS, LENGTHS = (1, 7, 65, 130), (1, 6, 7, 1)
BACKENDS = [reference, pytest.param(cpu, marks=pytest.mark.skipif(load_kernels() is None, reason="no kernels"))]
DTYPES = [torch.float32, torch.bfloat16]


def make_metadata(lengths: tuple[int, ...] = LENGTHS, contexts: tuple[int, ...] = CONTEXTS) -> AttentionMetadata:
    return scattered(lengths, contexts, BLOCK_SIZE, NUM_BLOCKS)


def make_index(dtype: torch.dtype = torch.float32, num_pools: int = 3) -> tuple[PoolIndexCall, Tensor]:
    """Returns an indexer's results, and a cache of the keys and gates of all positions."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(sum(LENGTHS), NUM_HEADS, SIZE, generator=generator).to(dtype)
    weights = torch.randn(sum(LENGTHS), NUM_HEADS, generator=generator)
    cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2 * SIZE, generator=generator).to(dtype)
    gates = torch.randn(POOL_SIZE, SIZE, generator=generator).to(dtype)
    made = PoolIndexCall(
        query, cache[:0, 0], weights, partial(pool_keys, gates), POOL_SIZE, layer=0, num_pools=num_pools
    )
    return made, cache


def pool_keys(gates: Tensor, kept: Tensor, _: Tensor) -> Tensor:
    return sparse_pools.weighed_by_gates(kept, gates)


def slots_of(table: Tensor, num_seen: int) -> Tensor:
    positions = torch.arange(num_seen)
    return table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE


def pool_keys_of(index: PoolIndexCall, rows: Tensor) -> Tensor:
    """Returns the keys of whole pools of a sequence's keys and gates [T, 2 * size], in double precision."""
    whole = rows[: len(rows) // POOL_SIZE * POOL_SIZE].double().view(-1, POOL_SIZE, 2, SIZE)
    (gates,) = cast("partial[Tensor]", index.pool_keys).args
    shares = (whole[:, :, 1] + gates.double()).softmax(dim=1)
    return (shares * whole[:, :, 0]).sum(1)


def written(index: PoolIndexCall, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Returns the cache with the keys of all pools, as if all positions were of this step."""
    cache = cache.clone()
    for table, context in zip(metadata.block_tables, metadata.context_lens.tolist(), strict=True):
        starts, own = torch.tensor([0, context], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
        whole = AttentionMetadata(table[None], starts, own, torch.zeros(context).long(), context, context)
        sparse_pools.write_pool_keys(index, cache, whole)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_s_key_lies_at_its_last_position(dtype: torch.dtype) -> None:
    metadata, (index, cache) = make_metadata(), make_index(dtype)
    rows, after = cache.flatten(0, 1), written(index, cache, metadata).flatten(0, 1)
    for table, context in zip(metadata.block_tables, CONTEXTS, strict=True):
        slots = slots_of(table, context)
        last = slots[POOL_SIZE - 1 :: POOL_SIZE]
        expected = pool_keys_of(index, rows[slots])
        tolerance = 1e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(after[last, :SIZE].double(), expected, rtol=tolerance, atol=tolerance)
        after[last, :SIZE] = rows[last, :SIZE]
    assert torch.equal(after, rows)


def test_a_pool_s_key_depends_on_nothing_but_its_own_positions() -> None:
    """Pools are completed in one step, or one by one, and one that is computed again is the same."""
    metadata, (index, cache) = make_metadata(), make_index()
    expected, stepwise = written(index, cache, metadata), cache.clone()
    for table, context in zip(metadata.block_tables, CONTEXTS, strict=True):
        for end in range(1, context + 1):
            starts, own = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
            one = AttentionMetadata(table[None], starts, own, torch.zeros(1).long(), 1, end)
            slot = slots_of(table, end)[-1]
            for _ in range(2):
                stepwise.view(-1, 2 * SIZE)[slot] = cache.view(-1, 2 * SIZE)[slot]
                sparse_pools.write_pool_keys(index, stepwise, one)
    assert torch.equal(stepwise, expected)


@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_attends_to_the_best_pools_and_its_own(backend: Any, num_kv_heads: int) -> None:
    metadata, (index, cache) = make_metadata(), make_index()
    rows, kv = cache.flatten(0, 1), make_kv(num_kv_heads)
    keys = written(index, cache, metadata)
    chosen = sparse_pools.attending_to_pools(index, backend.choose_slots, keys, metadata, kv)
    token = 0
    for table, length, context in zip(metadata.block_tables, LENGTHS, CONTEXTS, strict=True):
        slots = slots_of(table, context)
        for position in range(context - length, context):
            expected = slots[positions_of(index, token, pool_keys_of(index, rows[slots]), position)]
            for head in range(num_kv_heads):
                assert rows_of(chosen, token * num_kv_heads + head) == of_head(expected, head, num_kv_heads).tolist()
            token += 1
    assert token * num_kv_heads == len(chosen.context_lens)


def positions_of(index: PoolIndexCall, token: int, keys: Tensor, position: int) -> Tensor:
    """Returns the positions of the best pools, and those behind all whole ones."""
    num_whole = (position + 1) // POOL_SIZE
    products = (index.query[token].double() @ keys[:num_whole].T).relu()
    best = (index.weights[token].double() @ products).topk(min(3, num_whole)).indices.sort().values
    pooled = (best[:, None] * POOL_SIZE + torch.arange(POOL_SIZE)).flatten()
    return torch.cat((pooled, torch.arange(num_whole * POOL_SIZE, position + 1)))


def rows_of(chosen: AttentionMetadata, number: int) -> list[int]:
    """Returns which rows a query sees in a cache that is cut into blocks of two."""
    cuts = chosen.block_tables[number].long()
    rows: list[int] = (cuts[:, None] * 2 + torch.arange(2)).flatten()[: chosen.context_lens[number]].tolist()
    return rows


def of_head(slots: Tensor, head: int, num_kv_heads: int) -> Tensor:
    """Returns where a head's rows lie that are in these slots, if all heads of a block follow one another."""
    return (slots // BLOCK_SIZE * num_kv_heads + head) * BLOCK_SIZE + slots % BLOCK_SIZE


def make_kv(num_kv_heads: int, size_v: int = 12) -> LayerCache:
    generator = torch.Generator().manual_seed(3)
    sizes = (16, size_v)
    keys, values = (torch.randn(NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, size, generator=generator) for size in sizes)
    return LayerCache(keys, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_of_keys_depends_on_nothing_but_its_own_positions(dtype: torch.dtype) -> None:
    kept = torch.randn(31, POOL_SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    means = sparse_pools.mean_of(kept)
    torch.testing.assert_close(means, kept.double().mean(1).to(dtype))
    assert all(torch.equal(sparse_pools.mean_of(kept[at : at + 1])[0], means[at]) for at in range(31))


@pytest.mark.parametrize("is_latent", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_to_all_pools_is_that_to_all_positions(backend: Any, is_latent: bool) -> None:
    metadata, (index, cache) = make_metadata(), make_index(num_pools=32)
    kv = make_kv(1 if is_latent else 2)
    kv = LayerCache(kv.keys, kv.keys[..., :12]) if is_latent else kv
    query = torch.randn(sum(LENGTHS), 4, 16, generator=torch.Generator().manual_seed(4))
    keys = written(index, cache, metadata)
    chosen = sparse_pools.attending_to_pools(index, backend.choose_slots, keys, metadata, kv)
    groups, params = sparse_pools.groups_of(index, kv), AttentionParams(0.3)
    attended = chosen_blocks.attend_in_groups(backend.paged_attention, query, groups, kv, chosen, params)
    assert torch.equal(attended, backend.paged_attention(query, kv, metadata, params))


def test_all_is_attended_to_where_no_token_sees_more_pools() -> None:
    index, _ = make_index(num_pools=32)
    assert sparse_pools.sees_all_pools(index, make_metadata())
    assert not sparse_pools.sees_all_pools(index._replace(num_pools=31), make_metadata())
