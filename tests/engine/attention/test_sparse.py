"""Sparse attention: which positions are chosen, and that attention of a token is over these, by every backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import cpu, reference, sparse
from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams, IndexCall
from engine.kernels import load_kernels
from tests.engine.attention.paged_sequences import scattered

NUM_HEADS, SIZE, NUM_BLOCKS, BLOCK_SIZE, LATENT = 12, 20, 40, 4, 24
CONTEXTS, LENGTHS = (3, 65, 130), (2, 7, 1)
BACKENDS = [reference, pytest.param(cpu, marks=pytest.mark.skipif(load_kernels() is None, reason="no kernels"))]
DTYPES = [torch.float32, torch.bfloat16]


def make_metadata(lengths: tuple[int, ...], contexts: tuple[int, ...]) -> AttentionMetadata:
    return scattered(lengths, contexts, BLOCK_SIZE, NUM_BLOCKS * 2)


def make_index(num_tokens: int, dtype: torch.dtype, num_chosen: int = 8) -> tuple[IndexCall, Tensor]:
    """Returns an indexer's results and its keys of all positions."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(num_tokens, NUM_HEADS, SIZE, generator=generator).to(dtype)
    weights = torch.randn(num_tokens, NUM_HEADS, generator=generator)
    cache = torch.randn(NUM_BLOCKS * 2, BLOCK_SIZE, SIZE, generator=generator).to(dtype)
    return IndexCall(query, cache[:0, 0], weights, 0, num_chosen), cache


def rows_of(metadata: AttentionMetadata) -> list[tuple[Tensor, int]]:
    """Returns each token's block table, and how many positions it sees."""
    lengths = metadata.cu_seqlens_q.diff().tolist()
    each = zip(metadata.block_tables, lengths, metadata.context_lens.tolist(), strict=True)
    return [(table, context - length + 1 + i) for table, length, context in each for i in range(length)]


def slots_of(table: Tensor, num_seen: int) -> Tensor:
    positions = torch.arange(num_seen)
    return table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_positions_are_chosen_in_their_order(backend: Any, dtype: torch.dtype) -> None:
    metadata = make_metadata(LENGTHS, CONTEXTS)
    index, cache = make_index(sum(LENGTHS), dtype)
    chosen = backend.choose_slots(index, cache, metadata)
    keys = cache.flatten(0, 1).double()
    for token, (table, num_seen) in enumerate(rows_of(metadata)):
        slots = slots_of(table, num_seen)
        products = (index.query[token].double() @ keys[slots].T).relu()
        scores = index.weights[token].double() @ products
        best = slots[scores.topk(min(8, num_seen)).indices.sort().values].tolist()
        assert chosen[token].tolist() == best + [0] * (8 - len(best))


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_scores_the_earlier_position_comes_first(backend: Any) -> None:
    """Scores of 0, of either sign, and of NaN are no exception."""
    metadata = make_metadata((1,), (70,))
    index, cache = make_index(1, torch.float32)
    slots = slots_of(*rows_of(metadata)[0])
    index.weights.copy_(index.weights.abs())
    keys = cache.view(-1, SIZE)
    keys[slots] = -index.query[0, 0] * 1e3
    index.query.copy_(index.query[:, :1].expand_as(index.query))  # no product of these with a key is positive
    good = [66, 5, 40]
    keys[slots[good]] = index.query[0, 0]
    assert backend.choose_slots(index, cache, metadata)[0].tolist() == slots[[0, 1, 2, 3, 4, 5, 40, 66]].tolist()
    index.weights.neg_()
    assert backend.choose_slots(index, cache, metadata)[0].tolist() == slots[[0, 1, 2, 3, 4, 6, 7, 8]].tolist()
    keys[slots] = torch.nan
    assert backend.choose_slots(index, cache, metadata)[0].tolist() == slots[:8].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_choice_does_not_depend_on_what_else_is_computed(backend: Any, dtype: torch.dtype) -> None:
    """Weights are such that scores differ in their last bits only."""
    together = make_metadata((60,), (130,))
    index, cache = make_index(60, dtype)
    index.weights.mul_(1e-6)
    index.weights[:, 0] = 1.0
    cache.copy_(cache[0, 0] + 1e-6 * cache)
    expected = backend.choose_slots(index, cache, together)
    for token in (0, 31, 59):
        alone = AttentionMetadata(
            together.block_tables,
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([71 + token], dtype=torch.int32),
            together.slot_mapping[:1],
            *(1, 71 + token),
        )
        own = index._replace(query=index.query[token : token + 1], weights=index.weights[token : token + 1])
        assert torch.equal(backend.choose_slots(own, cache, alone), expected[token : token + 1])


@pytest.mark.parametrize("num_chosen", [8, 300])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_over_the_chosen_positions(backend: Any, num_chosen: int) -> None:
    """If all are chosen, it is attention over all, to the last bit."""
    metadata = make_metadata(LENGTHS, CONTEXTS)
    index, index_keys = make_index(sum(LENGTHS), torch.float32, num_chosen)
    rows = torch.randn(NUM_BLOCKS * 2, 1, BLOCK_SIZE, LATENT)
    cache, query = LayerCache(rows, rows[..., :16]), torch.randn(sum(LENGTHS), 3, LATENT)
    chosen = sparse.attending_to(backend.choose_slots(index, index_keys, metadata), metadata)
    output = backend.paged_attention(query, sparse.as_single_positions(cache), chosen, AttentionParams(0.3))
    if num_chosen > max(CONTEXTS):
        assert torch.equal(output, backend.paged_attention(query, cache, metadata, AttentionParams(0.3)))
    for token, count in enumerate(chosen.context_lens.tolist()):
        keys = rows.flatten(0, 2)[chosen.block_tables[token, :count].long()]
        weights = (0.3 * query[token] @ keys.T).softmax(-1)
        torch.testing.assert_close(output[token], weights @ keys[:, :16])


def test_index_keys_are_written_to_their_slots() -> None:
    cache, keys = torch.zeros(3, BLOCK_SIZE, SIZE), torch.randn(2, SIZE)
    sparse.write_index_keys(keys, cache, torch.tensor([9, 2]))
    assert torch.equal(cache[2, 1], keys[0]) and torch.equal(cache[0, 2], keys[1])
    assert int((cache != 0).any(-1).sum()) == 2


@pytest.mark.skipif(load_kernels() is None, reason="no kernels")
@pytest.mark.parametrize("change", [{"query": torch.zeros(10, NUM_HEADS, 5)}, {"weights": torch.zeros(10, 1)}])
def test_the_kernel_refuses_tensors_that_do_not_fit(change: dict[str, Tensor]) -> None:
    index, cache = make_index(sum(LENGTHS), torch.float32)
    with pytest.raises(RuntimeError, match="index"):
        cpu.choose_slots(index._replace(**change), cache, make_metadata(LENGTHS, CONTEXTS))
    with pytest.raises(RuntimeError, match="out of range"):
        cpu.choose_slots(index, cache[:2], make_metadata(LENGTHS, CONTEXTS))
