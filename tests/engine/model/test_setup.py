"""Settings are checked against the machine: memory, CPUs, and what its kernels multiply."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ModelMemoryError
from engine.core.machine import Ceilings
from engine.kernels import load_kernels
from engine.model import setup
from engine.model.setup import load_model_runner
from engine.weights.rank_group import ALONE
from tests.engine.tiny_models import make_checkpoint


def load(path: Path, **settings: Any) -> None:
    load_model_runner(EngineConfig(model=str(path), device="cpu", dtype="float32", **settings))


@pytest.mark.parametrize("size", [{"kv_cache_bytes": 10 << 20}, {"num_blocks": 1000}])
def test_a_kv_cache_must_fit_into_what_is_available(
    size: dict[str, int], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.caches.available_bytes", lambda _: 5 << 20)
    with pytest.raises(ModelMemoryError, match=r"and 5 MiB are available.*--kv-cache-memory-bytes or --num-gpu-blocks"):
        load(llama, **size)


def test_states_and_kv_share_the_memory_that_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, settings = make_checkpoint("qwen3_5", tmp_path), {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    for num_bytes, num_slots in ((1 << 20, 8), (100_000, 3)):
        _, info = load_model_runner(EngineConfig(model=str(path), kv_cache_bytes=num_bytes, max_num_seqs=8, **settings))
        assert info.state_checkpoint_tokens == (512 if info.num_state_checkpoints else 0)
        assert info.num_state_slots == num_slots and info.state_bytes_per_request == 2 * 4 * (3 * 128 + 4 * 12 * 32)
        assert 0.9 * num_bytes < info.kv_cache_bytes + num_slots * info.state_bytes_per_request <= num_bytes
    assert "states of a request take 0.0 MiB: 3 requests run at once, not 8" in caplog.text


def test_a_draft_model_is_refused_where_states_cannot_go_back(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draft-quantization int4: .* has recurrent states"):
        load(make_checkpoint("lfm2", tmp_path), draft_quantization="int4")


@pytest.mark.parametrize(
    ("device", "enforce_eager", "is_recorded"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_decode_steps_are_recorded_on_cuda_unless_that_is_forbidden(
    device: str, enforce_eager: bool, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "StaticInputs", lambda *shape: shape)
    monkeypatch.setattr(setup, "in_cuda_graphs", lambda forward, static, sizes: (forward, static, sizes))
    place = torch.device(device)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=SimpleNamespace(device=place))], block_size=16)
    caches: Any = SimpleNamespace(kv=cache, max_model_len=300)
    config, plain = EngineConfig(model="", max_num_seqs=5, enforce_eager=enforce_eager), object()
    found: Any = setup._recorded(config, plain, caches, ALONE)  # type: ignore[arg-type]
    assert found == ((plain, (5, 300, 16, place), (1, 2, 4, 5)) if is_recorded else plain)
    others_cannot: Any = SimpleNamespace(have_all=lambda value: False)
    assert setup._recorded(config, plain, caches, others_cannot) is plain  # type: ignore[arg-type]


def test_a_model_runs_by_what_was_recorded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_recorded", lambda config, forward, caches, _: Recorded(forward, caches.max_model_len))
    _, info = load_model_runner(EngineConfig(model=str(llama), device="cpu", dtype="float32", max_model_len=64))
    assert info.forward == "recorded up to 64"


class Recorded:
    """A forward pass that stands for one with its steps recorded."""

    def __init__(self, plain: Any, length: int) -> None:
        self.plain, self.name = plain, f"recorded up to {length}"


def test_more_threads_than_cpus_are_warned_of(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, num_cpus = torch.get_num_threads(), len(os.sched_getaffinity(0))
    try:
        load(llama, num_threads=num_cpus)
        assert "--num-threads" not in caplog.text
        load(llama, num_threads=num_cpus + 1)
        assert f"--num-threads {num_cpus + 1} is more than the {num_cpus} CPUs" in caplog.text
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_what_kernels_multiply_is_what_the_machine_is_measured_with(
    has_kernels: bool, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels, torch multiplies dequantized weights."""
    if has_kernels and load_kernels() is None:
        pytest.skip("no kernels here")
    asked: list[str] = []

    def measure(_: torch.device, __: torch.dtype, ___: int, quantization: str) -> Ceilings:
        asked.append(quantization)
        return Ceilings(1.0, 1.0)

    monkeypatch.setattr("engine.model.setup.measure_ceilings", measure)
    if not has_kernels:
        monkeypatch.setattr("engine.model.loading.placement.load_kernels", lambda: None)
        # what it does cannot be undone
        monkeypatch.setattr("engine.model.loading.preparation.replace_activations", lambda: None)
    load(llama, quantization="int4", num_blocks=4)
    assert asked == ["int4" if has_kernels else "none"]


def test_kv_lies_in_the_memory_that_outlives_the_process_where_the_next_one_could_go_on_with_it(
    tmp_path: Path, memory_fd: int, caplog: pytest.LogCaptureFixture
) -> None:
    llama, hybrid = make_checkpoint("llama", tmp_path), make_checkpoint("lfm2", tmp_path)

    def shared_by(path: Path, fd: int | None, **settings: Any) -> bool:
        config = EngineConfig(model=str(path), device="cpu", dtype="float32", num_blocks=4, **settings)
        return load_model_runner(config, kv_memory_fd=fd)[0].cache.shared is not None

    assert shared_by(llama, memory_fd)
    assert not shared_by(llama, None) and not shared_by(llama, memory_fd, enable_prefix_caching=False)
    assert not shared_by(hybrid, memory_fd)
    with open(os.devnull) as never_longer:
        assert not shared_by(llama, never_longer.fileno())
    assert "no memory can be shared" in caplog.text
