"""Paged attention is softmax attention, writes exactly its slots, and refuses what it does not support."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention import AttentionBackend, AttentionParams, LayerCache, cpu, reference, select_backend
from engine.kernels import load_kernels
from tests.engine.attention.attention_cases import (
    BF16,
    BLOCK_SIZES,
    OPTIONS,
    SHAPES,
    kernel_backend,
    same_bits,
    sequences_for,
    with_sinks,
)
from tests.engine.attention.paged_sequences import Shape, alone, attend, dense_attention, lay_out, make_sequence

pytestmark = pytest.mark.usefixtures("one_thread")


# It is attention


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_softmax_attention(backend: AttentionBackend, shape: Shape, options: dict[str, Any]) -> None:
    options = with_sinks(options, shape)
    sequences = sequences_for(backend, shape)
    for sequence, result in zip(sequences, attend(backend, lay_out(sequences), **options), strict=True):
        torch.testing.assert_close(result, dense_attention(sequence, **options), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bfloat16_is_rounded_once(backend: AttentionBackend, shape: Shape, options: dict[str, Any]) -> None:
    options = with_sinks(options, shape)
    sequences = sequences_for(backend, replace(shape, dtype=BF16))
    for sequence, result in zip(sequences, attend(backend, lay_out(sequences), **options), strict=True):
        # One rounding may fall to either side: half a unit in the last place (2**-8) plus float32's error.
        exact = dense_attention(replace(sequence, query=sequence.query.double()), **options)
        torch.testing.assert_close(result.double(), exact, atol=3e-6, rtol=2**-8 + 1e-5)


@pytest.mark.parametrize("magnitude", [1e-4, 0.3, 30.0, 3000.0])
def test_softcap_is_exact_at_every_magnitude(backend: AttentionBackend, magnitude: float) -> None:
    sequence = make_sequence(Shape(), 5, 100)
    sequence = replace(sequence, query=sequence.query * magnitude)
    torch.testing.assert_close(
        alone(backend, sequence, softcap=30.0), dense_attention(sequence, softcap=30.0), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("position", [0, 63, 64, 600, 1099])
def test_one_dominant_key_takes_all(backend: AttentionBackend, position: int) -> None:
    sequence = make_sequence(Shape(), 1, 1100)
    sequence.keys[position] = 1000 * sequence.query[0, ::2]
    result = alone(backend, replace(sequence, query=sequence.query[:, [0, 0, 2, 2]]))
    assert torch.equal(result[0], sequence.values[position, [0, 0, 1, 1]])


def test_keys_yet_to_come_do_not_change_the_sign_of_zero(backend: AttentionBackend) -> None:
    """One key, of value -0, takes all the weight; values are negative up to the query, and positive after it."""
    sequence = make_sequence(Shape(heads=2), 128, 128)
    sequence.query[:], sequence.keys[:], sequence.values[:] = 1.0, -200.0, -1.0
    sequence.keys[70], sequence.values[70], sequence.values[101:] = 200.0, -0.0, 1.0
    for rows in (alone(backend, sequence)[100], alone(backend, sequence.chunk(100, 101))[0]):
        assert same_bits(rows, torch.zeros_like(rows))


@pytest.mark.parametrize("context_len", [1, 70, 513, 1100])
def test_a_key_that_is_not_a_number_is_not_hidden(backend: AttentionBackend, context_len: int) -> None:
    sequence = make_sequence(Shape(), 1, context_len)
    sequence.keys[-1] = torch.nan
    assert alone(backend, sequence).isnan().all()


def test_a_sink_of_minus_infinity_is_no_sink(backend: AttentionBackend) -> None:
    sequence = make_sequence(Shape(), 3, 70)
    assert same_bits(alone(backend, sequence, sinks=torch.full((4,), -torch.inf)), alone(backend, sequence))


def test_a_huge_sink_takes_all(backend: AttentionBackend) -> None:
    assert not alone(backend, make_sequence(Shape(), 3, 70), sinks=torch.full((4,), 1e4)).any()


def test_an_empty_batch_has_an_empty_result(backend: AttentionBackend) -> None:
    paged = lay_out([make_sequence(Shape(value_size=8), 1, 9)])
    none = torch.zeros(0, dtype=torch.int32)
    metadata = replace(
        paged.metadata, block_tables=none[:, None], cu_seqlens_q=torch.zeros(1, dtype=torch.int32), context_lens=none
    )
    query = paged.query[:0]
    result = backend.paged_attention(query, paged.cache, metadata, AttentionParams(1.0))
    assert result.shape == (0, 4, 8)


def test_query_strides_do_not_matter(backend: AttentionBackend) -> None:
    paged = lay_out([make_sequence(Shape(), 20, 50)])
    expected = attend(backend, paged)[0]
    for transposed in (paged.query.transpose(0, 1).contiguous().transpose(0, 1), paged.query.mT.contiguous().mT):
        assert same_bits(attend(backend, replace(paged, query=transposed))[0], expected)


# Writing


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_exactly_the_slots_are_written(backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> None:
    shape = Shape(size=12, value_size=7, dtype=dtype)
    paged = lay_out([make_sequence(shape, 1, 20), make_sequence(shape, 9, 33), make_sequence(shape, 5, 5)], block_size)
    tokens = range(paged.query.shape[0])
    for cache in paged.cache:
        for slot in paged.metadata.slot_mapping.tolist():
            cache[slot // block_size, :, slot % block_size] = 5.0
    caches = LayerCache(*(tensor.clone() for tensor in paged.cache))
    backend.write_kv(paged.token_keys, paged.token_values, caches, paged.metadata.slot_mapping)
    for token, slot in zip(tokens, paged.metadata.slot_mapping.tolist(), strict=True):
        paged.cache.keys[slot // block_size, :, slot % block_size] = paged.token_keys[token]
        paged.cache.values[slot // block_size, :, slot % block_size] = paged.token_values[token]
    assert all(map(same_bits, caches, paged.cache))


def test_strides_of_what_is_written_do_not_matter(backend: AttentionBackend) -> None:
    paged = lay_out([make_sequence(Shape(), 9, 33)])
    by_heads = paged.token_keys.transpose(0, 1).contiguous().transpose(0, 1)
    by_columns = paged.token_values.mT.contiguous().mT
    caches = LayerCache(*(tensor.nan_to_num(1.0) for tensor in paged.cache))
    backend.write_kv(by_heads, by_columns, caches, paged.metadata.slot_mapping)
    assert all(torch.equal(cache, want.nan_to_num(1.0)) for cache, want in zip(caches, paged.cache, strict=True))


def test_types_that_the_kernel_lacks_still_work() -> None:
    half = lay_out([make_sequence(Shape(dtype=torch.float16), 3, 70)])
    torch.testing.assert_close(attend(kernel_backend(), half)[0], attend(reference, half)[0])
    written, wanted = (LayerCache(*map(torch.zeros_like, half.cache)) for _ in range(2))
    cpu.write_kv(half.token_keys, half.token_values, written, half.metadata.slot_mapping)
    reference.write_kv(half.token_keys, half.token_values, wanted, half.metadata.slot_mapping)
    assert all(map(torch.equal, written, wanted)) and bool(written[0].any())


# Which backend


def test_the_fastest_backend_is_selected() -> None:
    device = torch.device("cpu")
    assert select_backend(device, None) is reference
    assert select_backend(device, load_kernels()) is (reference if load_kernels() is None else cpu)


def test_cuda_has_a_backend_of_its_own() -> None:
    pytest.importorskip("triton", reason="pip install -e '.[triton]' brings what CUDA kernels are written in")
    assert select_backend(torch.device("cuda"), None).__name__ == "engine.attention.cuda"


def test_what_the_kernel_does_not_do_is_refused() -> None:
    backend, paged = kernel_backend(), lay_out([make_sequence(Shape(), 3, 70)])
    with pytest.raises(RuntimeError, match="head size"):
        attend(backend, replace(paged, query=paged.query[:, :, :-1]))
    with pytest.raises(RuntimeError, match="int32"):
        attend(backend, replace(paged, metadata=replace(paged.metadata, context_lens=paged.metadata.slot_mapping)))
    with pytest.raises(RuntimeError, match="scaling"):
        attend(backend, paged, scaling=0.0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"cu_seqlens_q": [0, 2]}, "cover all queries"),
        ({"cu_seqlens_q": [1, 3]}, "cover all queries"),
        ({"context_lens": [2]}, "has 3 queries, a context of 2"),
        ({"context_lens": [81]}, "a table of 5 blocks"),
        ({"block_tables": [[0, 1, 2, 3, 8]]}, "block of sequence 0 is out of range"),
        ({"block_tables": [[0, 1, -1, 3, 4]]}, "block of sequence 0 is out of range"),
    ],
)
def test_numbers_that_lead_out_of_the_cache_are_refused(metadata: dict[str, list[Any]], message: str) -> None:
    backend, paged = kernel_backend(), lay_out([make_sequence(Shape(), 3, 70)])
    wrong = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in metadata.items()}
    with pytest.raises(RuntimeError, match=message):
        attend(backend, replace(paged, metadata=replace(paged.metadata, **wrong)))


@pytest.mark.parametrize("slot", [-1, 8 * 16])
def test_slots_out_of_the_cache_are_refused(slot: int) -> None:
    backend, paged = kernel_backend(), lay_out([make_sequence(Shape(), 3, 70)])
    slots = torch.tensor([0, slot, 2])
    with pytest.raises(RuntimeError, match="slot is out of range"):
        backend.write_kv(paged.token_keys, paged.token_values, paged.cache, slots)


def test_caches_without_heads_or_room_are_refused() -> None:
    backend, paged = kernel_backend(), lay_out([make_sequence(Shape(), 3, 70)])
    for empty in (paged.cache.keys[:, :0], paged.cache.keys[:, :, :0]):
        with pytest.raises(RuntimeError, match="must have kv heads"):
            attend(backend, replace(paged, cache=LayerCache(empty, empty)))
