"""A model that is read from the packed cache is the one that was loaded: the same facts, the same bits of logits."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import ModelMemoryError
from engine.core.sampling_params import SamplingParams
from engine.model import packed_cache, packed_key
from engine.model.decoder_parts import DecoderParts
from engine.model.planning import paged_weights
from engine.model.setup import load_model_runner
from engine.runner.model_inputs import build_inputs
from engine.runner.model_runner import ModelRunner
from tests.crossed import crossed
from tests.engine.model.mtp_checkpoints import make_checkpoint_with_head
from tests.engine.model.steps import BLOCK_SIZE, STEPS, request
from tests.engine.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "kernels")

KNOWN = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "smollm3_nope",
    "cohere2",
    "starcoder2",
    "granite",
    "qwen2_moe",
    "glm4_moe",
    "ministral3",
)
MEASURED = ("load_s", "ceilings")


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusts the times of files that were made just now."""
    monkeypatch.setattr(packed_key, "_TICK_S", -1.0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path)


def load(model: Path, cache: Path, **settings: Any) -> tuple[ModelRunner, EngineInfo]:
    config = EngineConfig(
        **{"model": str(model), "device": "cpu", "dtype": "float32", "num_blocks": 12, "block_size": BLOCK_SIZE}
        | {"packed_cache": str(cache), "free_window_blocks": False}  # `request` has one block table
        | settings
    )
    return load_model_runner(config)


def is_kept(runner: ModelRunner) -> bool:
    return isinstance(runner._model.module, DecoderParts)


def was_found(model: Path, cache: Path, **settings: Any) -> bool:
    return is_kept(load(model, cache, **settings)[0])


@torch.inference_mode()
def computed(runner: ModelRunner) -> list[Tensor]:
    """Logits and hidden states of several steps, then the KV that they wrote."""
    for tensor in chain.from_iterable(runner.cache.layers):
        tensor.zero_()
    batches = [[request(*each) for each in step] for step in STEPS]
    outputs = [runner._run_model(build_inputs(batch, BLOCK_SIZE, torch.device("cpu")), None)[:2] for batch in batches]
    return [*chain.from_iterable(outputs), *chain.from_iterable(runner.cache.layers)]


def are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, some, others)) and len(some) == len(others)


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"), crossed(KNOWN, ("float32", "bfloat16"), ("none", "int8", "int4"))
)
def test_a_kept_model_computes_the_same_bits(name: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    model, cache = make_checkpoint(name, tmp_path), tmp_path / "cache"
    settings = {"dtype": dtype, "quantization": quantization}
    loaded, info = load(model, cache, **settings)
    kept, kept_info = load(model, cache, **settings)
    assert not is_kept(loaded) and is_kept(kept)
    assert are_equal(computed(loaded), computed(kept))
    same = {name: getattr(info, name) for name in MEASURED}
    assert msgspec.structs.replace(kept_info, **same) == info


@pytest.mark.parametrize("make", [pytest.param(make_checkpoint, marks=pytest.mark.slow), make_checkpoint_with_head])
def test_a_kept_model_needs_no_code_of_transformers(make: Callable[[str, Path], Path], tmp_path: Path) -> None:
    checkpoint = make("llama", tmp_path)
    load(checkpoint, tmp_path / "cache")
    script = (
        "import sys; from engine.core.config import EngineConfig; from engine.model.setup import load_model_runner\n"
        f"load_model_runner(EngineConfig(model={str(checkpoint)!r}, device='cpu', dtype='float32', num_blocks=12,\n"
        f"block_size={BLOCK_SIZE}, packed_cache={str(tmp_path / 'cache')!r}))\n"
        "sys.exit('transformers' in sys.modules)"
    )
    time.sleep(0.1)  # the other process waits for the clock
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_what_a_start_warns_of_is_told_by_each(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        caplog.clear()
        load(checkpoint, tmp_path / "cache")
        assert f"{checkpoint} names no token that ends a text" in caplog.text
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 5}')
    caplog.clear()
    load(checkpoint, tmp_path / "cache")
    assert "names no token" not in caplog.text


def test_another_checkpoint_format_or_configuration_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(checkpoint, cache)
    assert was_found(checkpoint, cache)
    assert not was_found(checkpoint, cache, dtype="bfloat16")
    assert not was_found(checkpoint, cache, quantization="int8")
    assert not was_found(checkpoint, cache, kv_cache_dtype="bfloat16")
    weights = checkpoint / "model.safetensors"
    content, before = bytearray(weights.read_bytes()), weights.stat()
    content[-3] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times has it
    changed, info = load(checkpoint, cache)
    assert not is_kept(changed)
    assert load(checkpoint, cache)[1].weights_fingerprint == info.weights_fingerprint


def test_files_that_changed_just_now_are_not_trusted(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_key, "_TICK_S", 3600.0)
    load(checkpoint, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_kept(checkpoint: Path, tmp_path: Path) -> None:
    cache = packed_cache.PackedCache(EngineConfig(model=str(checkpoint), packed_cache=str(tmp_path / "cache")))
    runner, _ = load(checkpoint, tmp_path / "other")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 9}')
    cache.keep(runner._model, runner._run_model.parts)  # type: ignore[attr-defined]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["a bit", "cut", "empty", "header", "facts"])
def test_a_damaged_file_is_loaded_again_and_replaced(
    checkpoint: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    expected = computed(load(checkpoint, cache)[0])
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 4
    elif damage == "header":
        content[:8] = b"\xff" * 8
    elif damage == "facts":
        content[-9] ^= 1
    file.write_bytes({"cut": content[:-700], "empty": b""}.get(damage, content))
    with caplog.at_level(logging.WARNING):
        runner, _ = load(checkpoint, cache)
    assert not is_kept(runner) and are_equal(computed(runner), expected)
    assert f"{file} is not used" in caplog.text
    assert was_found(checkpoint, cache)


def test_models_that_do_not_run_in_the_kernels_as_a_whole_are_not_kept(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(make_checkpoint("opt", tmp_path), cache)
    load(checkpoint, cache, draft_quantization="int4")
    load(checkpoint, cache, trust_remote_code=True)
    assert not cache.exists()


def test_the_longest_unused_models_go_where_there_are_too_many_bytes(tmp_path: Path) -> None:
    cache, models = tmp_path / "cache", [make_checkpoint(name, tmp_path) for name in ("llama", "qwen2", "qwen3")]
    for model in models[:2]:
        load(model, cache)
    sizes = [path.stat().st_size for path in cache.iterdir()]
    for path in cache.iterdir():
        os.utime(path, (1, 1))
    assert was_found(models[0], cache)
    (cache / "x.writing").write_bytes(b"x")
    os.utime(cache / "x.writing", (1, 1))
    load(models[2], cache, packed_cache_bytes=sum(sizes) + min(sizes) // 2)
    assert len(list(cache.iterdir())) == 2
    assert was_found(models[0], cache) and was_found(models[2], cache)
    load(models[1], cache, packed_cache_bytes=10)
    assert len(list(cache.iterdir())) == 2


def test_a_place_that_cannot_be_written_costs_a_line_in_the_log(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert not was_found(checkpoint, tmp_path / "file")
    assert "packed weights cannot be kept" in caplog.text


def test_an_mtp_head_is_kept_with_its_model_and_drafts_the_same(tmp_path: Path) -> None:
    model, cache = make_checkpoint_with_head("llama", tmp_path), tmp_path / "cache"
    (loaded, info), (kept, kept_info) = load(model, cache), load(model, cache)
    assert not is_kept(loaded) and is_kept(kept)
    measured = {name: getattr(info, name) for name in MEASURED}
    assert msgspec.structs.replace(kept_info, **measured) == info and info.has_head
    drafts = [drafts_of(runner) for runner in (loaded, kept)]
    assert drafts[0] == drafts[1] and len(drafts[0]) == 4
    for settings in ({"mtp": False}, {"num_speculative_tokens": 0}):
        runner, info = load(model, cache, **settings)
        assert not info.has_head and runner._model.draft is None
    assert was_found(model, cache, mtp=False)


def test_a_model_is_not_kept_without_the_head_that_its_checkpoint_brings(tmp_path: Path) -> None:
    architecture = "qwen2"  # its head is named as MiMo's
    model, cache = make_checkpoint_with_head(architecture, tmp_path, without_norm), tmp_path / "cache"
    assert not was_found(model, cache) and not was_found(model, cache)
    assert not was_found(model, cache, mtp=False) and was_found(model, cache, mtp=False)


def without_norm(tensors: dict[str, Tensor], names: dict[str, str]) -> None:
    del tensors[f"{names['']}{names['norm']}.weight"]


def drafts_of(runner: ModelRunner) -> Sequence[int]:
    """Four tokens that the head drafts behind a text."""
    text = [5, 9, 2, 7, 11, 3]
    params = SamplingParams(temperature=0.0)

    def share(start: int, end: int, num_wanted: int) -> ScheduledRequest:
        span = (start, end)
        return ScheduledRequest(
            "a", text[start:end], start, (0, 1, 2), params, text, [], True, draft_span=span, num_wanted=num_wanted
        )

    runner.prefill(Batch(Phase.PREFILL, (share(0, 5, 0),)))
    [request] = runner.draft(Batch(Phase.DECODE, (share(5, 6, 4),))).requests
    return request.draft


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(paged_weights, "available_bytes", lambda device: num_bytes)


def is_mapped(file: Path) -> bool:
    return str(file) in Path("/proc/self/maps").read_text()


def is_leased(file: Path) -> bool:
    locks = Path("/proc/locks").read_text().splitlines()
    return any("LEASE" in lock and f":{file.stat().st_ino} " in lock for lock in locks)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_a_model_that_is_larger_than_memory_stays_in_its_file_and_computes_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, cache = make_checkpoint(name, tmp_path), tmp_path / "cache"
    expected = computed(load(model, cache, quantization="int4")[0])
    (file,) = cache.iterdir()
    kept, _ = load(model, cache, quantization="int4")
    assert not is_mapped(file) and not is_leased(file) and "paged" not in caplog.text
    free_memory(monkeypatch, file.stat().st_size)
    paged, info = load(model, cache, quantization="int4")
    assert is_kept(paged) and is_mapped(file) and is_leased(file)
    assert are_equal(computed(paged), expected) and are_equal(computed(kept), expected)
    assert f"they are paged from {cache} (disk at " in caplog.text and "tokens/s of one stream" in caplog.text
    assert info.weight_bytes == kept._model.weight_bytes


def test_a_damaged_file_is_not_paged(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    load(checkpoint, cache)
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    monkeypatch.setattr(packed_cache, "are_too_large", lambda num_bytes, config: True)
    assert not was_found(checkpoint, cache)


def test_a_file_that_somebody_writes_to_is_not_paged(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    load(checkpoint, cache)
    (file,) = cache.iterdir()
    monkeypatch.setattr(packed_cache, "are_too_large", lambda num_bytes, config: True)
    with file.open("r+b"):
        assert not was_found(checkpoint, cache)
    assert f"{file} is not used: somebody is writing to it" in caplog.text


def test_a_model_that_would_crawl_is_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    load(checkpoint, cache)
    free_memory(monkeypatch, 1000)
    monkeypatch.setattr(packed_cache, "paging_bytes_per_s", lambda path: 1000.0)
    with pytest.raises(ModelMemoryError, match=r"paged from .* allows 0\.\d+ tokens per second, less than 0\.5"):
        load(checkpoint, cache)
