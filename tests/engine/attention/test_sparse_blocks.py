"""Block-sparse attention: which blocks are chosen, and that attention of each group of heads is over these."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import chosen_blocks, cpu, reference, sparse_blocks
from engine.attention.kv_cache import LayerCache
from engine.attention.kv_format import is_quantized, quantize
from engine.attention.metadata import AttentionMetadata, AttentionParams, BlockIndexCall
from engine.kernels import load_kernels
from engine.weights.batch_invariant_matmul import cancelling_operands
from tests.engine.attention.paged_sequences import scattered

NUM_HEADS, NUM_INDEX_HEADS, SIZE, NUM_BLOCKS, BLOCK_SIZE = 8, 4, 24, 200, 4
CONTEXTS, LENGTHS = (3, 65, 700), (2, 7, 9)
BACKENDS = [reference, pytest.param(cpu, marks=pytest.mark.skipif(load_kernels() is None, reason="no kernels"))]
PARAMS = AttentionParams(0.3)


def make_metadata(lengths: tuple[int, ...], contexts: tuple[int, ...]) -> AttentionMetadata:
    return scattered(lengths, contexts, BLOCK_SIZE, NUM_BLOCKS)


def make_index(num_tokens: int = sum(LENGTHS), **changes: Any) -> tuple[BlockIndexCall, Tensor]:
    """Returns an indexer's results and its keys of all positions."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(num_tokens, NUM_INDEX_HEADS, SIZE, generator=generator)
    cache = torch.randn(NUM_BLOCKS, BLOCK_SIZE, SIZE, generator=generator)
    call = BlockIndexCall(query, cache[:0, 0], layer=0, block_size=6, num_blocks=3, num_near=1)
    return call._replace(**changes), cache


def make_cache(num_kv_heads: int = 2, size_v: int = 12) -> LayerCache:
    generator = torch.Generator().manual_seed(3)
    sizes = (16, size_v)
    keys, values = (torch.randn(NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, size, generator=generator) for size in sizes)
    return LayerCache(keys, values)


def rounded(cache: LayerCache, dtype: torch.dtype) -> LayerCache:
    return LayerCache(*(quantize(each, dtype) for each in cache)) if is_quantized(dtype) else cache


def blocks_of(index: BlockIndexCall, keys: Tensor, positions: list[int]) -> list[list[list[int]]]:
    """Returns the blocks that are chosen, without what fills up."""
    chosen = sparse_blocks.choose_blocks(index, index.query, keys, torch.tensor(positions))
    num_all = -(-len(keys) // index.block_size)
    return [[[block for block in head if block < num_all] for head in token] for token in chosen.tolist()]


@pytest.mark.parametrize("num_near", [0, 1, 2])
def test_the_best_blocks_are_chosen_in_their_order(num_near: int) -> None:
    positions = [0, 5, 6, 40, 699]
    index, cache = make_index(len(positions), num_near=num_near)
    keys = cache.flatten(0, 1)[:700]
    for token, position in enumerate(positions):
        scores = index.query[token].double() @ keys[: position + 1].double().T
        best = torch.stack([part.amax(-1) for part in scores.split(index.block_size, dim=1)], dim=1)
        own = position // index.block_size
        best[:, max(0, own - num_near + 1) : own + (num_near > 0)] = torch.inf
        expected = best.topk(min(3, own + 1), dim=1).indices.sort(1).values.tolist()
        assert blocks_of(index, keys, positions)[token] == expected


def test_a_block_s_score_is_that_of_the_best_position_that_is_seen() -> None:
    index, cache = make_index()
    queries, keys, positions = index.query.flatten(0, 1), cache.flatten(0, 1)[:700], torch.arange(72) + 470
    seen = torch.arange(702) <= positions[:, None]  # tiles end before position 510
    products = torch.nn.functional.pad(queries.double() @ keys.double().T, (0, 2)).masked_fill(~seen, -torch.inf)
    expected = products.view(72, -1, 6).amax(-1)
    scores = sparse_blocks._block_scores(queries, keys, positions, 6)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_earlier_block_is_chosen() -> None:
    index, cache = make_index(1, num_near=0)
    keys = torch.zeros_like(cache.flatten(0, 1)[:100])
    assert blocks_of(index, keys, [99]) == [[[0, 1, 2]] * NUM_INDEX_HEADS]
    index = index._replace(num_near=1)
    assert blocks_of(index, keys, [99]) == [[[0, 1, 16]] * NUM_INDEX_HEADS]


@pytest.mark.parametrize("size", [24, 128])
def test_a_score_depends_on_nothing_but_its_query_and_key(size: int) -> None:
    """Products cancel out, so that any other order of their sums would change bits."""
    num_threads = torch.get_num_threads()
    queries, keys = cancelling_operands(1100, torch.Size((1500, size)), torch.float32, torch.device("cpu"))
    positions = torch.full((len(queries),), len(keys) - 1)
    expected = sparse_blocks._block_scores(queries, keys, positions, 1)
    try:
        for threads, first, end in ((1, 0, 1), (1, 1, 4), (2, 3, 21), (2, 7, 1000), (4, 1099, 1100)):
            torch.set_num_threads(threads)
            part = sparse_blocks._block_scores(queries[first:end], keys, positions[first:end], 1)
            assert torch.equal(part, expected[first:end])
            fewer = sparse_blocks._block_scores(queries[first:end], keys[:700], positions[first:end].clamp(max=699), 1)
            assert torch.equal(fewer, expected[first:end, :700])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_over_the_chosen_blocks(backend: Any, num_kv_heads: int) -> None:
    metadata, cache = make_metadata(LENGTHS, CONTEXTS), make_cache(num_kv_heads)
    index, index_keys = make_index()
    query = torch.randn(len(index.query), NUM_HEADS, 16, generator=torch.Generator().manual_seed(4))
    attended = attend(backend, query, index, index_keys, metadata, cache)
    row = 0
    for i, (context, length) in enumerate(zip(CONTEXTS, LENGTHS, strict=True)):
        own = torch.arange(context)
        slots = metadata.block_tables[i].long()[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE
        for position in range(context - length, context):
            one = index._replace(query=index.query[row : row + 1])
            blocks = blocks_of(one, index_keys.flatten(0, 1)[slots], [position])[0]
            for head in range(NUM_HEADS):
                chosen = torch.tensor(blocks[head * NUM_INDEX_HEADS // NUM_HEADS])
                seen = (chosen[:, None] * index.block_size + torch.arange(index.block_size)).flatten()
                of_head = rows_of_head(cache, head * num_kv_heads // NUM_HEADS, slots[seen[seen <= position]])
                expected = backend.paged_attention(query[row : row + 1, head : head + 1], *of_head, PARAMS)
                assert torch.equal(attended[row, head], expected[0, 0])
            row += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_over_all_blocks_is_that_over_all_positions(backend: Any, dtype: torch.dtype) -> None:
    metadata, cache = make_metadata(LENGTHS, CONTEXTS), rounded(make_cache(size_v=16), dtype)
    index, index_keys = make_index(num_blocks=200)
    query = torch.randn(len(index.query), NUM_HEADS, 16, generator=torch.Generator().manual_seed(4))
    expected = backend.paged_attention(query, cache, metadata, PARAMS)
    assert torch.equal(attend(backend, query, index, index_keys, metadata, cache), expected)


def attend(
    backend: Any,
    query: Tensor,
    index: BlockIndexCall,
    index_keys: Tensor,
    metadata: AttentionMetadata,
    cache: LayerCache,
) -> Tensor:
    chosen = sparse_blocks.attending_to_blocks(index, index_keys, metadata, cache)
    groups = sparse_blocks.groups_of(index, cache)
    return chosen_blocks.attend_in_groups(backend.paged_attention, query, groups, cache, chosen, PARAMS)


def rows_of_head(cache: LayerCache, head: int, slots: Tensor) -> tuple[LayerCache, AttentionMetadata]:
    """Returns a cache of these positions of one head, in one block, and what has one token attend to all of it."""
    rows = (each[:, head].reshape(-1, each.shape[3])[slots][None, None].contiguous() for each in cache)
    context = torch.tensor([len(slots)], dtype=torch.int32)
    starts, table = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    return LayerCache(*rows), AttentionMetadata(table, starts, context, torch.zeros(1).long(), 1, len(slots))
