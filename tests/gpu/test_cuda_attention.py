"""Paged attention in Triton: softmax attention by definition, and the same bits however it is cut up."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import AttentionBackend, LayerCache, reference
from engine.attention.kv_format import num_bits, row_size, undo_transform
from tests.engine.attention.paged_sequences import (
    Paged,
    Sequence,
    Shape,
    attend,
    dense_attention,
    lay_out,
    make_sequence,
)
from tests.gpu.cross_compile import CAPABILITIES, SHARED_KIB, Usage, compiled

BF16 = torch.bfloat16
BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, BF16: 1.6e-2}
LENGTHS = ((1, 1), (1, 65), (20, 70), (1, 300), (33, 33), (5, 513))


@pytest.fixture(scope="module")
def device(triton_device: torch.device) -> torch.device:
    return triton_device


@pytest.fixture(scope="module")
def backend(device: torch.device) -> AttentionBackend:
    from engine.attention import cuda

    return cuda


def run(backend: AttentionBackend, device: torch.device, sequences: list[Sequence], **options: Any) -> list[Tensor]:
    block_size = options.pop("block_size", 16)
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    return [x.cpu() for x in attend(backend, lay_out(sequences, block_size, device=str(device)), **moved)]


def check(backend: AttentionBackend, device: torch.device, shape: Shape, **options: Any) -> None:
    sequences = [make_sequence(shape, *lengths) for lengths in LENGTHS]
    bound = BOUNDS[shape.dtype]
    for sequence, result in zip(sequences, run(backend, device, sequences, **options), strict=True):
        expected = dense_attention(sequence, **{name: x for name, x in options.items() if name != "block_size"})
        torch.testing.assert_close(result, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 37}, {"sliding_window": 1}, {"softcap": 3.0}, {"sinks": torch.linspace(-1, 2, 4)}],
)
def test_it_is_softmax_attention(
    backend: AttentionBackend, device: torch.device, options: dict[str, Any], dtype: torch.dtype
) -> None:
    check(backend, device, Shape(dtype=dtype), **options)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(14, 2, 64, 64, BF16),
        Shape(8, 8, 128, 128, BF16),
        Shape(4, 1, 256, 256, BF16),
        Shape(4, 2, 80, 80, BF16),
        Shape(4, 4, 192, 128, BF16),
        Shape(71, 1, 64, 64, BF16),
        Shape(2, 1, 512, 512, BF16),
        Shape(20, 1, 80, 64, BF16, is_latent=True),
        Shape(3, 3, 12, 20),
        Shape(4, 4, 20, 10, BF16),
    ],
    ids=str,
)
@pytest.mark.slow
def test_all_sizes_of_heads_and_values(backend: AttentionBackend, device: torch.device, shape: Shape) -> None:
    check(backend, device, shape)


@pytest.mark.parametrize("block_size", [1, 5, 32])
@pytest.mark.slow
def test_all_sizes_of_blocks(backend: AttentionBackend, device: torch.device, block_size: int) -> None:
    check(backend, device, Shape(dtype=BF16), block_size=block_size, sliding_window=300)


ROUNDED = (
    Shape(4, 2, 64, 64, BF16, torch.int8),
    Shape(4, 2, 64, 64, torch.float32, torch.uint8),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in (
            Shape(4, 2, 16, 128, BF16, torch.int8),
            Shape(4, 2, 80, 48, torch.float16, torch.uint8),
            Shape(2, 2, 192, 112, BF16, torch.int8),
            Shape(2, 2, 256, 96, BF16, torch.uint8),
            Shape(20, 1, 272, 256, BF16, torch.int8, is_latent=True),
            Shape(4, 1, 272, 256, torch.float32, torch.uint8, is_latent=True),
        )
    ),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which the interpreter computes with
@pytest.mark.parametrize("shape", ROUNDED, ids=str)
def test_rounded_keys_and_values_have_the_bytes_of_the_reference(
    backend: AttentionBackend, device: torch.device, shape: Shape
) -> None:
    paged = lay_out([make_sequence(shape, 33, 33)], device=str(device))
    keys, values = paged.token_keys.clone(), paged.token_values.clone()
    keys[3], keys[4, 0, 5], keys[5, 0, 7], keys[6], keys[7] = 0, torch.inf, torch.nan, keys[6] * 1e-4, keys[7] * 1e4
    keys[8] = undo_transform((torch.arange(shape.size) == 2) * 127.0 * 128.0)  # two scales err by nothing
    values[:, :, 3] = 100
    slots = paged.metadata.slot_mapping.roll(1)
    found, expected = (with_room_like(paged.cache, where, shape.is_latent) for where in (device, torch.device("cpu")))
    backend.write_kv(keys, values, found, slots)
    reference.write_kv(keys.cpu(), values.cpu(), expected, slots.cpu())
    assert torch.equal(found.keys.cpu(), expected.keys) and torch.equal(found.values.cpu(), expected.values)


def with_room_like(cache: LayerCache, device: torch.device, is_latent: bool) -> LayerCache:
    keys, values = (torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in cache)
    return LayerCache(keys, keys[..., : values.shape[3]] if is_latent else values)


@pytest.mark.parametrize("shape", ROUNDED, ids=str)
def test_attention_over_rounded_keys_and_values_is_that_of_the_reference(
    backend: AttentionBackend, device: torch.device, shape: Shape
) -> None:
    sequences = [make_sequence(shape, *lengths) for lengths in ((1, 1), (5, 70), (1, 300))]
    bound = max(2e-4, BOUNDS[shape.dtype])  # the reference rounds queries to 16 bits, too
    for options in ({}, {"sliding_window": 37}):
        expected = [attend(reference, lay_out([each]), **options)[0] for each in sequences]
        for result, exact in zip(run(backend, device, sequences, **options), expected, strict=True):
            torch.testing.assert_close(result, exact, atol=bound, rtol=bound)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 37}, {"sinks": torch.linspace(-1, 2, 14)}])
@pytest.mark.slow
def test_a_sequence_is_the_same_alone_in_a_batch_and_in_chunks(
    backend: AttentionBackend, device: torch.device, options: dict[str, Any], kv_dtype: torch.dtype | None
) -> None:
    shape = Shape(14, 2, 64, 64, BF16, kv_dtype)
    sequences = [make_sequence(shape, *lengths) for lengths in (*LENGTHS, (40, 600))]
    together = run(backend, device, sequences, **options)
    for sequence, result in zip(sequences, together, strict=True):
        num = len(result)
        assert torch.equal(run(backend, device, [sequence], block_size=32, **options)[0], result)
        for begin, end in ((0, num // 3), (num // 3, num - 1), (num - 1, num)):
            if begin < end:
                part = run(backend, device, [sequence.chunk(begin, end)], **options)[0]
                assert torch.equal(part, result[begin:end])


@settings(max_examples=6)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 600)), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 60, 300]),
    num_parts=st.integers(2, 6),
    kv_heads=st.sampled_from([1, 2, 4]),
    rows=st.sampled_from([16, 32]),
    bits=st.sampled_from([0, 8, 4]),
)
@pytest.mark.slow
def test_no_plan_changes_a_bit(
    lengths: list[tuple[int, int]],
    window: int | None,
    num_parts: int,
    kv_heads: int,
    rows: int,
    bits: int,
    device: torch.device,
) -> None:
    from engine.kernels.cuda.attention_plan import Layer, Plan, prefill_tile

    shape = Shape(4, kv_heads, 16, 16, BF16, {8: torch.int8, 4: torch.uint8}.get(bits))
    paged = lay_out([make_sequence(shape, new, new + old) for new, old in lengths], device=str(device))
    layer = Layer(device, BF16, 4, kv_heads, 16, 16, bits)
    tile, counts = prefill_tile(layer), (len(paged.query), len(lengths))
    plans = [Plan.of(layer, tile, *counts, 1), Plan.of(layer, tile._replace(rows=rows), *counts, num_parts)]
    one, other = (attend_with(paged, window, plan) for plan in plans)
    assert torch.equal(one, other)


def attend_with(paged: Paged, window: int | None, plan: Any) -> Tensor:
    from engine.kernels.cuda.attention import attend_paged

    meta = paged.metadata
    where = meta.block_tables, meta.cu_seqlens_q, meta.context_lens, meta.max_context_len
    return attend_paged(
        paged.query, *paged.cache, *where, plan, 0.3, window, 20.0, torch.linspace(-1, 2, 4, device=paged.query.device)
    )


@pytest.mark.slow
def test_tiles_of_decode_have_the_bits_of_prefill(device: torch.device) -> None:
    from engine.kernels.cuda.attention_plan import Layer, decode_tile, prefill_tile
    from engine.kernels.cuda.decode_probe import _attend_random, is_decode_exact

    layers = Layer(device, BF16, 8, 2, 128, 128), Layer(device, torch.float16, 7, 1, 64, 64)
    for layer in (*layers, layers[0]._replace(kv_bits=8), layers[1]._replace(kv_bits=4)):
        assert decode_tile(layer).rows == 16 < prefill_tile(layer).rows
        assert torch.equal(*(_attend_random(layer, tile(layer)) for tile in (decode_tile, prefill_tile)))
        assert is_decode_exact(layer)


def test_sequences_that_fill_a_batch_up_change_nothing(backend: AttentionBackend, device: torch.device) -> None:
    sequences = [make_sequence(Shape(dtype=BF16), 1, length) for length in (1, 300)]
    paged = lay_out(sequences, device=str(device))
    meta = paged.metadata
    filled = replace(
        paged,
        query=torch.cat([paged.query, torch.full_like(paged.query, torch.nan)]),
        metadata=replace(
            meta,
            block_tables=torch.cat([meta.block_tables, meta.block_tables * 0]),
            cu_seqlens_q=torch.arange(5, dtype=torch.int32, device=device),
            context_lens=torch.cat([meta.context_lens, meta.context_lens * 0]),
            max_context_len=5000,
        ),
    )
    results = attend(backend, filled)
    for result, expected in zip(results, attend(backend, paged), strict=False):
        assert torch.equal(result, expected)
    assert not torch.cat(results[2:]).any()


@pytest.mark.parametrize("shape", [Shape(dtype=BF16), Shape(2, 2, 12, 20), Shape(dtype=torch.float16)])
def test_exactly_the_slots_are_written(backend: AttentionBackend, device: torch.device, shape: Shape) -> None:
    paged = lay_out([make_sequence(shape, 9, 33)], device=str(device))
    caches = LayerCache(*(tensor.nan_to_num(1.0) for tensor in paged.cache))
    for slot in paged.metadata.slot_mapping.tolist():
        for cache in caches:
            cache[slot // 16, :, slot % 16] = 0
    slots = torch.cat([paged.metadata.slot_mapping, paged.metadata.slot_mapping[:1] * 0 - 1])
    keys, values = (torch.cat([x, x[:1] * 0 + 7]) for x in (paged.token_keys, paged.token_values))
    transposed = keys.transpose(0, 1).contiguous().transpose(0, 1)
    backend.write_kv(transposed, values, caches, slots)
    assert all(torch.equal(one, other.nan_to_num(1.0)) for one, other in zip(caches, paged.cache, strict=True))


@pytest.mark.parametrize("kv_dtype", [BF16, torch.int8, torch.uint8])
def test_rows_have_the_sizes_of_the_format(kv_dtype: torch.dtype, device: torch.device) -> None:
    from engine.kernels.cuda.attention_plan import Layer

    for size, size_v in ((64, 128), (80, 48), (576, 512)):
        layer = Layer(device, BF16, 4, 2, size, size_v, num_bits(kv_dtype))
        assert layer.cache_dtype == kv_dtype
        assert layer.row_sizes == (row_size(size, kv_dtype), row_size(size_v, kv_dtype))


@pytest.mark.parametrize("shared_kib", sorted({*SHARED_KIB.values()}))
def test_tiles_have_shared_memory(shared_kib: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What compiled kernels take in fact, the next test sees."""
    from engine.kernels.cuda import attention_plan

    monkeypatch.setattr(attention_plan, "shared_bytes", lambda _: shared_kib << 10)
    latents = attention_plan.Layer(device, BF16, 16, 1, 576, 512, is_latent=True)
    assert attention_plan.prefill_tile(latents).num_stages == (1 if shared_kib == 99 else 2)
    assert attention_plan.prefill_tile(latents._replace(size=128, size_v=128)).num_stages == 2


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_is_compiled_for_every_gpu(capability: int) -> None:
    """Tiles of decode spill nothing to speak of. Those of prefill do, and are faster all the same where that was
    measured."""
    usages = compiled("tests.gpu.attention_launches:launch_all", (capability,))
    assert {usage.kernel for usage in usages} == {"_attend_kernel", "_merge_kernel", "_write_kernel"}
    for usage in usages:
        assert usage.shared_bytes <= SHARED_KIB[usage.capability] << 10, usage
        assert usage.spilled <= (80 if _is_light(usage) else 1000), usage


def _is_light(usage: Usage) -> bool:
    """Whether the kernel is one of decode in 16 bits, or no attention at all. Rows of 4 bits that end in half a group
    are no common ones."""
    rows = int(usage.constants.get("HEADS", 1)) * int(usage.constants.get("TOKENS", 1))
    ends_in_half = usage.constants.get("KV_BITS") == "4" and int(usage.constants.get("SIZE", 0)) % 32 > 0
    return rows <= 16 and usage.types[0] != "*fp32" and not ends_in_half
