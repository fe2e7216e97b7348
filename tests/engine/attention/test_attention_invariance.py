"""A row of paged attention depends on nothing but its own context, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import AttentionBackend
from tests.engine.attention.attention_cases import (
    BF16,
    BLOCK_SIZES,
    OPTIONS,
    QUANTIZABLE,
    QUANTIZED,
    SHAPES,
    named_backend,
    same_bits,
    sequences_for,
    with_sinks,
)
from tests.engine.attention.paged_sequences import Shape, alone, attend, lay_out, make_sequence

INVARIANT = [
    pytest.param(
        named,
        replace(shape, dtype=dtype),
        options,
        id=f"{named}-{shape_id}-{options_id}-{str(dtype).removeprefix('torch.')}",
        marks=() if named == "reference" or (options_id == "all") == (dtype is BF16) else pytest.mark.slow,
    )
    for named in ("reference", "kernel")
    for shape_id, shape in SHAPES.items()
    for options_id, options in OPTIONS.items()
    for dtype in (torch.float32, BF16)
    if (named == "kernel" and options_id in ("plain", "all")) or shape_id == "odd_sizes"
]
INVARIANT += [
    pytest.param(
        named,
        replace(QUANTIZABLE[shape_id], dtype=dtype, kv_dtype=kv_dtype),
        OPTIONS[options_id],
        id=f"{named}-{shape_id}-{options_id}-{str(dtype).removeprefix('torch.')}-{kv}",
        marks=() if (options_id == "all") == (dtype is BF16) else pytest.mark.slow,
    )
    for named, shape_id, options_id in (
        ("reference", "values_larger", "all"),
        *(("kernel", shape_id, options_id) for shape_id in QUANTIZABLE for options_id in ("plain", "all")),
    )
    for dtype, kv, kv_dtype in (
        *((torch.float32, kv, kv_dtype) for kv, kv_dtype in {**QUANTIZED, "bfloat16": BF16}.items()),
        *((BF16, kv, kv_dtype) for kv, kv_dtype in QUANTIZED.items()),
    )
]
invariant = pytest.mark.parametrize(("named", "shape", "options"), INVARIANT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs each test on one thread, unless it sets another number: more cost time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
@pytest.mark.parametrize("dtype", [torch.float32, BF16, *QUANTIZED.values()])
@pytest.mark.parametrize("named", ["reference", "kernel"])
def test_chunking_changes_nothing(named: str, dtype: torch.dtype, cuts: set[int], block_size: int) -> None:
    backend = named_backend(named)
    plain = Shape(size=12, value_size=20, dtype=dtype)
    is_quantized = dtype in QUANTIZED.values()
    sequence = make_sequence(Shape(size=48, value_size=32, kv_dtype=dtype) if is_quantized else plain, 150, 150)
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
    """Twelve sequences are enough tasks that contexts are no longer split among threads."""
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
