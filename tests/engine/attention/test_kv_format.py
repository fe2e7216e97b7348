"""Quantized keys and values: what is stored, and that attention over it is attention over these numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.ggml_formats import q4_0, q8_0
from engine.attention import AttentionBackend, LayerCache, reference
from engine.attention.kv_cache import LayerShape, bytes_per_block
from engine.attention.kv_format import (
    dequantize,
    num_numbers,
    quantize,
    row_size,
    transform_queries,
    undo_transform,
)
from engine.kernels import load_kernels
from tests.crossed import crossed
from tests.engine.attention.attention_cases import (
    BF16,
    OPTIONS,
    QUANTIZABLE,
    QUANTIZED,
    kernel_backend,
    same_bits,
    sequences_for,
    with_sinks,
)
from tests.engine.attention.paged_sequences import (
    Sequence,
    Shape,
    alone,
    attend,
    dense_attention,
    lay_out,
    make_sequence,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512)
quantized = pytest.mark.parametrize("kv_dtype", QUANTIZED.values(), ids=QUANTIZED)


def stored(x: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Returns the numbers that a cache holds of keys or values x [..., size], transformed back."""
    return undo_transform(dequantize(quantize(x, kv_dtype)))


def keys_of_all_kinds(size: int) -> Tensor:
    """Returns keys [tokens, 2, size] of many magnitudes, with outliers, zeros and numbers that are not finite."""
    generator = torch.Generator().manual_seed(size)
    keys = torch.randn(40, 2, size, generator=generator)
    keys[1] *= 1e-3
    keys[2] *= 1e-30
    keys[3] *= 1e-38
    keys[4] *= 1e30
    keys[5] = 0.0
    keys[6, :, 3] = 1000.0
    keys[7] = 1.0
    keys[8, 0, 5] = torch.nan
    keys[9, 1, size - 1] = torch.inf
    keys[10] = 3e38
    keys[11] = keys[11].round()  # ties
    keys[12, 0] = -0.0
    return keys


# What is stored


@quantized
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_as_many_numbers_as_were_put_in(size: int, kv_dtype: torch.dtype) -> None:
    rows = quantize(torch.randn(3, 2, size), kv_dtype)
    assert rows.shape == (3, 2, row_size(size, kv_dtype)) and rows.dtype == kv_dtype
    assert num_numbers(rows.shape[-1], kv_dtype) == size and dequantize(rows).shape == (3, 2, size)


@quantized
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("size", SIZES)
def test_kernels_write_the_bytes_of_the_reference(size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    kernel, keys = kernel_backend(), keys_of_all_kinds(size).to(dtype)
    slots = torch.randperm(48)[: len(keys)]
    written, wanted = (_empty(size, kv_dtype) for _ in range(2))
    kernel.write_kv(keys, keys.flip(0), written, slots)
    reference.write_kv(keys, keys.flip(0), wanted, slots)
    assert all(map(torch.equal, written, wanted)) and bool(written.keys.any())


@quantized
def test_what_is_stored_of_a_token_depends_on_that_token_alone(
    backend: AttentionBackend, kv_dtype: torch.dtype
) -> None:
    keys, slots = keys_of_all_kinds(80), torch.randperm(48)[:40]
    together = _empty(80, kv_dtype)
    backend.write_kv(keys, keys, together, slots)
    for token in (0, 6, 8, 39):
        one = _empty(80, kv_dtype)
        backend.write_kv(keys[token : token + 1], keys[token : token + 1], one, slots[:1])
        at, of_one = divmod(int(slots[token]), 16), divmod(int(slots[0]), 16)
        assert torch.equal(together.keys[at[0], :, at[1]], one.keys[of_one[0], :, of_one[1]])


@quantized
def test_numbers_that_are_not_finite_stay_so(kv_dtype: torch.dtype) -> None:
    keys = keys_of_all_kinds(64)
    is_finite = dequantize(quantize(keys, kv_dtype)).isfinite().all(-1)
    assert is_finite[:8].all() and not is_finite[8, 0] and not is_finite[9, 1] and is_finite[8, 1] and is_finite[9, 0]


@pytest.mark.parametrize("size", SIZES)
def test_products_with_transformed_keys_stay_the_same(size: int) -> None:
    query, keys = torch.randn(2, 5, size)
    rows = quantize(keys, torch.int8)
    products = (transform_queries(query) * dequantize(rows)).sum(-1)
    torch.testing.assert_close(products, (query * stored(keys, torch.int8)).sum(-1), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(("kv_dtype", "theirs"), [(torch.int8, q8_0), (torch.uint8, q4_0)], ids=QUANTIZED)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_less_is_lost_than_in_llama_cpps_formats(size: int, outlier: float, kv_dtype: torch.dtype, theirs: Any) -> None:
    keys = torch.randn(2000, size, generator=torch.Generator().manual_seed(size))
    keys[:, 5] *= outlier
    loss, their_loss = ((numbers - keys).square().mean() for numbers in (stored(keys, kv_dtype), theirs(keys)))
    assert loss < 0.95 * their_loss


def test_bytes_of_a_block() -> None:
    layers = [LayerShape(2, 64, 64), LayerShape(1, 80, 128)]
    assert bytes_per_block(layers, 16, torch.int8) == 16 * (2 * 2 * (64 + 4) + 80 + 6 + 128 + 8)
    assert bytes_per_block(layers, 16, torch.uint8) == 16 * (2 * 2 * (32 + 4) + 40 + 6 + 64 + 8)
    assert bytes_per_block(layers, 16, BF16) == 2 * 16 * (2 * 2 * 64 + 80 + 128)


# Attention over it


@quantized
@pytest.mark.parametrize(("options_id", "shape_id"), crossed(OPTIONS, QUANTIZABLE))
def test_it_is_softmax_attention_over_what_is_stored(
    backend: AttentionBackend, shape_id: str, options_id: str, kv_dtype: torch.dtype
) -> None:
    shape = QUANTIZABLE[shape_id]
    options = with_sinks(OPTIONS[options_id], shape)
    sequences = sequences_for(backend, replace(shape, kv_dtype=kv_dtype))
    for sequence, result in zip(sequences, attend(backend, lay_out(sequences), **options), strict=True):
        expected = undo_transform(dense_attention(_as_stored(sequence), **options))
        torch.testing.assert_close(result, expected, atol=_tolerance(backend), rtol=1e-5)


@quantized
def test_a_heavy_weight_of_a_tiny_value_costs_others_no_bits(backend: AttentionBackend, kv_dtype: torch.dtype) -> None:
    sequence = make_sequence(Shape(size=64, value_size=64, kv_dtype=kv_dtype), 1, 64)
    sequence.keys[0] = sequence.query[0, ::2]  # 97 % of the weight of one query head of each key head
    sequence.values[0] *= 1e-4
    result = alone(backend, sequence)[:, ::2]
    expected = undo_transform(dense_attention(_as_stored(sequence)))[:, ::2]
    assert (result - expected).norm() < _tolerance(backend) * expected.norm()


@quantized
def test_bfloat16_is_rounded_once(backend: AttentionBackend, kv_dtype: torch.dtype) -> None:
    for sequence in sequences_for(backend, replace(QUANTIZABLE["grouped"], dtype=BF16, kv_dtype=kv_dtype)):
        exact = undo_transform(dense_attention(_as_stored(sequence)))
        torch.testing.assert_close(alone(backend, sequence).float(), exact, atol=_tolerance(backend), rtol=2**-8 + 1e-5)


@quantized
@pytest.mark.parametrize("size", [32, 48, 64, 80, 128])
def test_tiles_add_up_values_as_stored_rounded_to_bfloat16(size: int, kv_dtype: torch.dtype) -> None:
    kernels = load_kernels()
    if kernels is None or kernels.isa != "amx":
        pytest.skip("no AMX")
    sequence = make_sequence(Shape(size=size, value_size=size, kv_dtype=kv_dtype), 3, 131)
    sequence.query[:] = 0.0  # all weights are the same
    own = _as_stored(sequence)
    expected = undo_transform(dense_attention(replace(own, values=own.values.bfloat16().float())))
    torch.testing.assert_close(alone(kernel_backend(), sequence), expected, atol=2e-6, rtol=1e-5)


def test_queries_may_have_more_bits_than_the_cache(backend: AttentionBackend) -> None:
    for sequence in sequences_for(backend, Shape(size=20, value_size=12, kv_dtype=BF16)):
        rounded = replace(sequence, keys=sequence.keys.bfloat16(), values=sequence.values.bfloat16())
        torch.testing.assert_close(alone(backend, sequence), dense_attention(rounded), atol=3e-6, rtol=1e-5)


@quantized
@pytest.mark.parametrize("context_len", [1, 70, 513])
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_what_is_not_a_number_shows(
    backend: AttentionBackend, where: str, context_len: int, kv_dtype: torch.dtype
) -> None:
    sequence = make_sequence(Shape(kv_dtype=kv_dtype), 1, context_len)
    getattr(sequence, where)[-1] = torch.nan
    assert alone(backend, sequence).isnan().all()


@quantized
def test_no_result_is_a_negative_zero(backend: AttentionBackend, kv_dtype: torch.dtype) -> None:
    sequence = make_sequence(Shape(kv_dtype=kv_dtype), 3, 70)
    sequence.values[:] = -0.0
    assert same_bits(alone(backend, sequence), torch.zeros(3, 4, 16))


def test_rows_of_no_size_are_refused() -> None:
    backend, paged = kernel_backend(), lay_out([make_sequence(Shape(size=64, kv_dtype=torch.int8), 3, 70)])
    short = LayerCache(*(tensor[..., :-2].contiguous() for tensor in paged.cache))
    with pytest.raises(RuntimeError, match="no row of the cache has"):
        attend(backend, replace(paged, cache=short))
    with pytest.raises(RuntimeError, match="no row of the cache has"):
        backend.write_kv(paged.token_keys, paged.token_values, short, paged.metadata.slot_mapping)


def _empty(size: int, kv_dtype: torch.dtype) -> LayerCache:
    return LayerCache(*torch.zeros(2, 3, 2, 16, row_size(size, kv_dtype), dtype=kv_dtype))


def _as_stored(sequence: Sequence) -> Sequence:
    """Returns the sequence as it is stored and multiplied, transformed: so is its attention."""
    keys, values = (dequantize(quantize(x, sequence.kv_dtype)) for x in (sequence.keys, sequence.values))
    return replace(sequence, query=transform_queries(sequence.query), keys=keys, values=values)


def _tolerance(backend: AttentionBackend) -> float:
    """Kernels round weights to 16 bits; tiles multiply bfloat16: queries, keys and values are rounded to it."""
    kernels = load_kernels()
    if backend is reference or not kernels:
        return 5e-6
    return 2e-2 if kernels.isa == "amx" else 2e-4
