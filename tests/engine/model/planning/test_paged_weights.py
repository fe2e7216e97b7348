"""Weights that are larger than memory: what a token reads from the disk, and which starts are refused."""

from pathlib import Path

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import ModelMemoryError
from engine.core.machine import ModelSize
from engine.model.loader import load_model
from engine.model.planning import paged_weights
from engine.model.planning.paged_weights import are_too_large, check_paging_speed
from tests.engine.tiny_models import make_checkpoint

MB = 1_000_000
SIZE = ModelSize(
    **{"layer_bytes": 100 * MB, "layer_flops": 1, "head_bytes": 20 * MB, "head_flops": 1, "attention": ()},
    expert_bytes=1000 * MB,
    expert_share=0.125,
)
KV_BYTES = 64 * MB
CONFIG = EngineConfig(model="m", kv_cache_bytes=KV_BYTES)
BESIDE = KV_BYTES + paged_weights._OTHER_BYTES


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(paged_weights, "available_bytes", lambda device: num_bytes)


@pytest.mark.parametrize(
    ("kept_mb", "missing_mb"),
    [(120, 125), (620, 62.5), (1000, 15), (100, 245), (0, 245)],
)
def test_a_token_reads_the_experts_that_memory_does_not_keep(
    kept_mb: int, missing_mb: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_memory(monkeypatch, kept_mb * MB + BESIDE)
    check_paging_speed(Path("/cache"), 500.0 * MB, SIZE, CONFIG)
    assert f"paged from /cache (disk at 500 MB/s measured); expect at most {500 / missing_mb:.1f} tok" in caplog.text
    assert f"weights of {1120 * MB / 2**30:.1f} GiB" in caplog.text


def test_less_than_half_a_token_per_second_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, 120 * MB + BESIDE)
    check_paging_speed(Path("/cache"), 63.0 * MB, SIZE, CONFIG)
    with pytest.raises(ModelMemoryError, match=r"paged from /cache .* allows 0.48 tokens per second"):
        check_paging_speed(Path("/cache"), 60.0 * MB, SIZE, CONFIG)


def test_weights_have_what_the_kv_cache_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, 1120 * MB + BESIDE)
    assert not are_too_large(1120 * MB, CONFIG) and are_too_large(1121 * MB, CONFIG)


@pytest.mark.parametrize(("quantization", "share"), [("none", 11 / 32), ("int8", 0.25), ("int4", 0.125)])
def test_a_checkpoint_that_cannot_fit_in_any_form_is_refused_before_it_is_loaded(
    quantization: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint("llama", tmp_path)
    least = int((path / "model.safetensors").stat().st_size * share)
    config = EngineConfig(model=str(path), device="cpu", quantization=quantization)
    free_memory(monkeypatch, least - 1 + paged_weights._OTHER_BYTES)
    with pytest.raises(ModelMemoryError, match=r"take at least .* once they are packed"):
        load_model(config)
    free_memory(monkeypatch, least + 1 + paged_weights._OTHER_BYTES)
    load_model(config)
