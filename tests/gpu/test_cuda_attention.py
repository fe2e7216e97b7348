"""Paged attention on CUDA: its arguments to FlashAttention (checked anywhere), and its results (on a GPU)."""

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.attention import LayerCache, cuda, reference
from tests.engine.attention.paged_sequences import (
    Sequence,
    Shape,
    alone,
    attend,
    dense_attention,
    lay_out,
    make_sequence,
)

BF16 = torch.bfloat16
LENGTHS = ((1, 1), (1, 65), (20, 70), (1, 300), (33, 33))
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def cleared_caches() -> Iterator[None]:
    """Clears what the backend caches per process after each test."""
    caches = (cuda._warn_once, cuda._has_flash3, cuda._positions)
    yield
    for cache in caches:
        cache.cache_clear()


def flash_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """Computes what torch documents for `varlen_attn`, from the same arguments."""
    lengths_q = cu_seq_q.diff().tolist()
    lengths_k = options["seqused_k"].tolist() if cu_seq_k is None else cu_seq_k.diff().tolist()
    assert max(lengths_q) <= max_q and max(lengths_k) <= max_k
    assert options.get("enable_gqa", False) == (query.shape[1] != key.shape[-2])
    left, right = options["window_size"]
    assert right == 0 and options["scale"] == query.shape[2] ** -0.5
    if cu_seq_k is None:
        rows = [
            table[: -(-n // key.shape[1])].long() for table, n in zip(options["block_table"], lengths_k, strict=True)
        ]
        keys, values = ([x[r].flatten(0, 1)[:n] for r, n in zip(rows, lengths_k, strict=True)] for x in (key, value))
    else:
        keys, values = key.split(lengths_k), value.split(lengths_k)
    parts = zip(query.split(lengths_q), keys, values, strict=True)
    sequences = [Sequence(*each, kv_dtype=key.dtype) for each in parts]
    return torch.cat([dense_attention(s, sliding_window=None if left < 0 else left + 1) for s in sequences])


class Flash:
    """Stands for a `varlen_attn` of some torch: it refuses what that one has no parameter for."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.__signature__.bind(*args, **options)
        return flash_by_definition(*args, **options)


NEWEST = inspect.signature(varlen_attn)


def without(*names: str) -> inspect.Signature:
    return NEWEST.replace(parameters=[p for name, p in NEWEST.parameters.items() if name not in names])


@pytest.fixture(
    params=[
        (NEWEST, False),
        (NEWEST, True),
        (without("enable_gqa", "seqused_k", "block_table", "num_splits"), False),  # torch 2.11
    ],
    ids=["gathered", "blocks", "gathered by torch 2.11"],
)
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    signature, has_blocks = request.param
    monkeypatch.setattr(cuda, "varlen_attn", Flash(signature))
    monkeypatch.setattr(cuda, "_has_flash3", lambda device: has_blocks)
    monkeypatch.setattr(cuda._has_flash3, "cache_clear", lambda: None, raising=False)


@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("shape", [Shape(dtype=BF16), Shape(heads=3, kv_heads=3, size=64, value_size=64, dtype=BF16)])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.usefixtures("flash")
def test_flash_attention_is_asked_for_the_same(shape: Shape, window: int | None, block_size: int) -> None:
    sequences = [make_sequence(shape, *lengths) for lengths in LENGTHS]
    results = attend(cuda, lay_out(sequences, block_size), sliding_window=window)
    for sequence, result in zip(sequences, results, strict=True):
        torch.testing.assert_close(result, dense_attention(sequence, sliding_window=window), atol=0, rtol=0)


def test_decode_is_kept_on_the_kernel_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(cuda, "_has_flash3", lambda device: False)
    monkeypatch.setattr(cuda._has_flash3, "cache_clear", lambda: None, raising=False)
    monkeypatch.setattr(
        cuda, "varlen_attn", lambda q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size: seen.append(max_q) or q
    )
    alone(cuda, make_sequence(Shape(dtype=BF16), 1, 9))
    assert seen == [2]


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        (Shape(), {}, "float32"),
        (Shape(dtype=BF16), {"softcap": 3.0}, "softcap"),
        (Shape(dtype=BF16), {"sinks": torch.zeros(4)}, "sinks"),
        (Shape(size=12, value_size=12, dtype=BF16), {}, "head size 12"),
        (Shape(size=264, value_size=264, dtype=BF16), {}, "head size 264"),
        (Shape(value_size=8, dtype=BF16), {}, "value size 8"),
    ],
)
def test_what_flash_attention_lacks_is_done_by_the_reference_with_one_warning(
    shape: Shape, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    sequence = make_sequence(shape, 3, 40)
    for _ in range(2):
        assert torch.equal(alone(cuda, sequence, **options), alone(reference, sequence, **options))
    assert len(caplog.records) == 1 and reason in caplog.text


def test_a_torch_without_windows_is_left_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "varlen_attn", Flash(without("window_size")))
    sequence = make_sequence(Shape(dtype=BF16), 3, 40)
    assert torch.equal(alone(cuda, sequence), alone(reference, sequence))
    assert "scaling or windows in torch" in caplog.text


def test_block_tables_are_not_handed_to_a_torch_that_takes_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "varlen_attn", Flash(without("block_table")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert not cuda._has_flash3(torch.device("cuda"))
    assert "cannot hand block tables" in caplog.text


def on_gpu(sequences: list[Sequence], block_size: int = 16, **options: Any) -> list[Tensor]:
    return [x.cpu() for x in attend(cuda, lay_out(sequences, block_size, device="cuda"), **options)]


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [BF16, torch.float16])
    @pytest.mark.parametrize("window", [None, 37])
    @pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (8, 8, 128), (4, 1, 256), (4, 2, 80)])
    def test_it_is_softmax_attention(
        self, heads: int, kv_heads: int, size: int, window: int | None, dtype: torch.dtype
    ) -> None:
        shape = Shape(heads, kv_heads, size, size, dtype)
        sequences = [make_sequence(shape, *lengths) for lengths in LENGTHS]
        for sequence, result in zip(sequences, on_gpu(sequences, sliding_window=window), strict=True):
            torch.testing.assert_close(result, dense_attention(sequence, sliding_window=window), atol=2e-2, rtol=2e-2)

    @pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.linspace(-1, 2, 4)}])
    def test_the_reference_runs_there_too(self, options: dict[str, Any]) -> None:
        sequences = [make_sequence(Shape(), *lengths) for lengths in LENGTHS]
        moved = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in options.items()}
        for sequence, result in zip(sequences, on_gpu(sequences, **moved), strict=True):
            torch.testing.assert_close(result, dense_attention(sequence, **options), atol=3e-6, rtol=1e-5)

    @pytest.mark.parametrize("window", [None, 37])
    def test_a_sequence_is_the_same_alone_in_a_batch_and_in_chunks(self, window: int | None) -> None:
        shape = Shape(heads=14, kv_heads=2, size=64, value_size=64, dtype=BF16)
        sequences = [make_sequence(shape, *lengths) for lengths in (*LENGTHS, (200, 700))]
        together = on_gpu(sequences, sliding_window=window)
        for sequence, result in zip(sequences, together, strict=True):
            assert torch.equal(on_gpu([sequence], 32, sliding_window=window)[0], result)
            assert torch.equal(on_gpu([sequence.last()], sliding_window=window)[0], result[-1:])

    def test_exactly_the_slots_are_written(self) -> None:
        paged = lay_out([make_sequence(Shape(dtype=BF16), 9, 33)], device="cuda")
        caches = LayerCache(*(tensor.nan_to_num(1.0) for tensor in paged.cache))
        for slot in paged.metadata.slot_mapping.tolist():
            for cache in caches:
                cache[slot // 16, :, slot % 16] = 0
        cuda.write_kv(paged.token_keys, paged.token_values, caches, paged.metadata.slot_mapping)
        assert all(torch.equal(one, other.nan_to_num(1.0)) for one, other in zip(caches, paged.cache, strict=True))
