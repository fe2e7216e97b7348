"""Paged attention is softmax attention, and a row's result depends on nothing but its own context, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import AttentionBackend, cpu, reference, select_backend
from engine.kernels import load_kernels
from tests.engine.paged_sequences import Sequence, Shape, alone, attend, dense_attention, lay_out, make_sequence

BF16 = torch.bfloat16
SHAPES = {
    "grouped": Shape(heads=14, kv_heads=2, size=64, value_size=64),
    "odd_sizes": Shape(heads=2, kv_heads=1, size=7, value_size=5),
    "multi_query": Shape(heads=7, kv_heads=1, size=8, value_size=8),
    "one_key_head_each": Shape(heads=3, kv_heads=3, size=12, value_size=12),
    "size_one": Shape(heads=2, kv_heads=2, size=1, value_size=1),
    "values_smaller": Shape(heads=2, kv_heads=2, size=192, value_size=128),
    "values_larger": Shape(heads=4, kv_heads=2, size=80, value_size=96),
    "group_beyond_a_task": Shape(heads=70, kv_heads=1, size=16, value_size=16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 37},
    "window_of_one": {"sliding_window": 1},
    "window_of_a_tile": {"sliding_window": 64},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 100, "softcap": 5.0, "sinks": True},
}
BLOCK_SIZES = (1, 4, 16, 24, 32, 128)
# [num queries, context]: decode and prefill, below, at and above a tile (64) and a split (512) of positions.
LENGTHS = ((1, 1), (1, 64), (1, 65), (3, 3), (70, 70), (1, 513), (20, 530), (1, 1100))
SHORT_LENGTHS = ((1, 1), (1, 65), (3, 3), (20, 70), (1, 130))  # the reference is slow, and knows no splits


@pytest.fixture(params=["reference", "kernel"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return named_backend(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests say so where threads matter; elsewhere they only cost time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def named_backend(name: str) -> AttentionBackend:
    return reference if name == "reference" else kernel_backend()


def sequences_for(backend: AttentionBackend, shape: Shape) -> list[Sequence]:
    return [make_sequence(shape, *lengths) for lengths in (SHORT_LENGTHS if backend is reference else LENGTHS)]


def kernel_backend() -> AttentionBackend:
    if load_kernels() is None:
        pytest.skip("no kernels")
    return cpu


def with_sinks(options: dict[str, Any], shape: Shape) -> dict[str, Any]:
    return {**options, "sinks": torch.linspace(-3, 5, shape.heads)} if options.get("sinks") else options


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {torch.float32: torch.int32, BF16: torch.int16}[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


# ---- It is attention ----


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
    """One key, of value -0, takes all; the others weigh 0: negative values up to the query, positive ones after it."""
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
    result = backend.paged_attention(query, paged.key_cache, paged.value_cache, metadata, scaling=1.0)
    assert result.shape == (0, 4, 8)


def test_query_strides_do_not_matter(backend: AttentionBackend) -> None:
    paged = lay_out([make_sequence(Shape(), 20, 50)])
    expected = attend(backend, paged)[0]
    for transposed in (paged.query.transpose(0, 1).contiguous().transpose(0, 1), paged.query.mT.contiguous().mT):
        assert same_bits(attend(backend, replace(paged, query=transposed))[0], expected)


# ---- Bit for bit the same ----

INVARIANT = [
    pytest.param(
        named,
        replace(shape, dtype=dtype),
        options,
        id=f"{named}-{shape_id}-{options_id}-{str(dtype).removeprefix('torch.')}",
    )
    for named in ("reference", "kernel")
    for shape_id, shape in SHAPES.items()
    for options_id, options in OPTIONS.items()
    for dtype in (torch.float32, BF16)
    if (named == "kernel" and options_id in ("plain", "all")) or shape_id == "odd_sizes"
]
invariant = pytest.mark.parametrize(("named", "shape", "options"), INVARIANT)


@invariant
def test_a_sequence_is_the_same_alone_and_in_a_batch(named: str, shape: Shape, options: dict[str, Any]) -> None:
    backend, options = named_backend(named), with_sinks(options, shape)
    sequences = sequences_for(backend, shape)
    for sequence, result in zip(sequences, attend(backend, lay_out(sequences), **options), strict=True):
        assert same_bits(result, alone(backend, sequence, **options))


@invariant
def test_decoding_gives_what_prefill_gives(named: str, shape: Shape, options: dict[str, Any]) -> None:
    backend, options = named_backend(named), with_sinks(options, shape)
    sequence = make_sequence(shape, 90, 600)
    prefill = alone(backend, sequence, **options)
    for i in (0, 1, 2, 5, 40, 41, 88, 89):
        step = sequence.chunk(i, i + 1)
        assert same_bits(alone(backend, step, **options), prefill[i : i + 1])


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, 149), max_size=6), block_size=st.sampled_from(BLOCK_SIZES))
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("named", ["reference", "kernel"])
def test_chunking_changes_nothing(named: str, dtype: torch.dtype, cuts: set[int], block_size: int) -> None:
    backend = named_backend(named)
    sequence = make_sequence(Shape(size=12, value_size=20, dtype=dtype), 150, 150)
    edges = [0, *sorted(cuts), 150]
    chunks = [alone(backend, sequence.chunk(a, b), block_size, sliding_window=90) for a, b in pairwise(edges)]
    assert same_bits(torch.cat(chunks), alone(backend, sequence, sliding_window=90))


@invariant
def test_blocks_change_nothing(named: str, shape: Shape, options: dict[str, Any]) -> None:
    backend, options = named_backend(named), with_sinks(options, shape)
    sequences = [make_sequence(shape, *lengths) for lengths in ((1, 70), (5, 69), (1, 530))]
    expected = attend(backend, lay_out(sequences, block_size=16), **options)
    for block_size in BLOCK_SIZES:
        results = attend(backend, lay_out(sequences, block_size, placement=block_size), **options)
        assert all(map(same_bits, results, expected))


@invariant
def test_threads_change_nothing(named: str, shape: Shape, options: dict[str, Any]) -> None:
    backend, options = named_backend(named), with_sinks(options, shape)
    paged = lay_out([make_sequence(shape, 1, 1100), make_sequence(shape, 9, 700)])
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(attend(backend, paged, **options))
    assert all(same_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_many_sequences_share_threads_without_a_difference(backend: AttentionBackend) -> None:
    """Enough tasks that contexts are no longer split among threads."""
    torch.set_num_threads(2)
    sequences = [make_sequence(Shape(dtype=BF16), 1, 520 + i, seed=i) for i in range(12)]
    for sequence, result in zip(sequences, attend(backend, lay_out(sequences)), strict=True):
        assert same_bits(result, alone(backend, sequence))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_lies_outside_the_window_changes_nothing(backend: AttentionBackend, dtype: torch.dtype) -> None:
    sequence = make_sequence(Shape(dtype=dtype), 10, 700)
    keys, values = sequence.keys.clone(), sequence.values.clone()
    keys[: 700 - 10 + 1 - 50] = 77.0  # the first query sees the 50 keys up to its own, position 690
    values[: 700 - 10 + 1 - 50] = -3e3
    changed = replace(sequence, keys=keys, values=values)
    assert same_bits(alone(backend, changed, sliding_window=50), alone(backend, sequence, sliding_window=50))


# ---- Writing ----


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_exactly_the_slots_are_written(backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> None:
    shape = Shape(size=12, value_size=7, dtype=dtype)
    paged = lay_out([make_sequence(shape, 1, 20), make_sequence(shape, 9, 33), make_sequence(shape, 5, 5)], block_size)
    tokens = range(paged.query.shape[0])
    for cache in (paged.key_cache, paged.value_cache):
        for slot in paged.metadata.slot_mapping.tolist():
            cache[slot // block_size, :, slot % block_size] = 5.0
    caches = paged.key_cache.clone(), paged.value_cache.clone()
    backend.write_kv(paged.token_keys, paged.token_values, *caches, paged.metadata.slot_mapping)
    for token, slot in zip(tokens, paged.metadata.slot_mapping.tolist(), strict=True):
        paged.key_cache[slot // block_size, :, slot % block_size] = paged.token_keys[token]
        paged.value_cache[slot // block_size, :, slot % block_size] = paged.token_values[token]
    assert same_bits(caches[0], paged.key_cache) and same_bits(caches[1], paged.value_cache)


def test_strides_of_what_is_written_do_not_matter(backend: AttentionBackend) -> None:
    paged = lay_out([make_sequence(Shape(), 9, 33)])
    expected = paged.key_cache, paged.value_cache
    by_heads = paged.token_keys.transpose(0, 1).contiguous().transpose(0, 1)
    by_columns = paged.token_values.mT.contiguous().mT
    caches = paged.key_cache.nan_to_num(1.0), paged.value_cache.nan_to_num(1.0)
    backend.write_kv(by_heads, by_columns, *caches, paged.metadata.slot_mapping)
    assert all(torch.equal(cache, want.nan_to_num(1.0)) for cache, want in zip(caches, expected, strict=True))


def test_types_that_the_kernel_lacks_still_work() -> None:
    half = lay_out([make_sequence(Shape(dtype=torch.float16), 3, 70)])
    torch.testing.assert_close(attend(kernel_backend(), half)[0], attend(reference, half)[0])
    cpu.write_kv(half.token_keys, half.token_values, half.key_cache, half.value_cache, half.metadata.slot_mapping)


# ---- Which backend ----


def test_the_fastest_backend_is_selected() -> None:
    device = torch.device("cpu")
    assert select_backend(device, None) is reference
    assert select_backend(device, load_kernels()) is (reference if load_kernels() is None else cpu)
    assert select_backend(torch.device("cuda"), None).__name__ == "engine.attention.cuda"


def test_what_the_kernel_does_not_do_is_refused() -> None:
    backend, paged = kernel_backend(), lay_out([make_sequence(Shape(), 3, 70)])
    with pytest.raises(RuntimeError, match="head size"):
        attend(backend, replace(paged, query=paged.query[:, :, :-1]))
    with pytest.raises(RuntimeError, match="int32"):
        attend(backend, replace(paged, metadata=replace(paged.metadata, context_lens=paged.metadata.slot_mapping)))
    with pytest.raises(RuntimeError, match="scaling"):
        attend(backend, paged, scaling=0.0)
