"""The largest steps run before the engine is ready, and the KV cache leaves what they take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine.attention import reference
from engine.core.batch import Batch
from engine.core.config import EngineConfig
from engine.core.errors import ModelMemoryError
from engine.model import setup, trial_step
from engine.model.loader import load_model
from engine.runner.model_runner import ModelRunner
from tests.engine.tiny_models import make_checkpoint

CONFIG = EngineConfig(model="", max_num_batched_tokens=100, max_num_seqs=9)
CUDA = SimpleNamespace(device=torch.device("cuda"))


def test_the_largest_steps_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(EngineConfig(model=str(make_checkpoint("llama", tmp_path)), device="cpu", dtype="float32"))
    sizes: list[tuple[str, int, int]] = []

    def recorded(run: Any) -> Any:
        def run_and_record(runner: ModelRunner, batch: Batch) -> Any:
            output = run(runner, batch)
            sizes.append((batch.phase, batch.num_tokens, sum(len(each.token_ids) for each in output.requests)))
            return output

        return run_and_record

    monkeypatch.setattr(ModelRunner, "prefill", recorded(ModelRunner.prefill))
    monkeypatch.setattr(ModelRunner, "decode", recorded(ModelRunner.decode))
    for longest in (256, 40):
        for step in trial_step.trial_steps(CONFIG, model, longest, reference):
            step()
    assert sizes == [("prefill", 100, 1), ("decode", 9, 9), ("prefill", 40, 1), ("decode", 9, 9)]


@pytest.fixture
def cuda_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which steps allocate: 3,000 bytes at most for the prompt, 700 for a token of each sequence."""
    peaks = iter([8000, 5700])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)


@pytest.mark.usefixtures("cuda_memory")
@pytest.mark.parametrize(("enforce_eager", "num_bytes"), [(True, 3000), (False, 3700)])
def test_steps_take_what_the_largest_allocates_and_what_recorded_ones_keep(
    enforce_eager: bool, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_step, "trial_steps", lambda *_: (lambda: None, lambda: None))
    config = msgspec.structs.replace(CONFIG, enforce_eager=enforce_eager)
    assert trial_step.bytes_of_a_step(config, CUDA, 256, reference) == num_bytes


@pytest.mark.usefixtures("cuda_memory")
def test_a_step_for_which_memory_is_short_is_refused_by_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial_step, "trial_steps", run_out)
    with pytest.raises(ModelMemoryError, match=r"step of 100 tokens or 9 sequences .* lower --max-num-batched-tokens"):
        trial_step.bytes_of_a_step(CONFIG, CUDA, 256, reference)


def test_the_kv_cache_leaves_what_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.caches.available_bytes", lambda _: 10 << 20)
    config = EngineConfig(model=str(make_checkpoint("llama", tmp_path)), device="cpu", dtype="float32")
    num_bytes = []
    for step_bytes in (8 << 20, 9 << 20):
        monkeypatch.setattr(setup, "_step_bytes", lambda *_, taken=step_bytes: taken)
        num_bytes.append(setup.load_model_runner(config)[1].kv_cache_bytes)
    assert 0.9 * (1 << 20) < num_bytes[0] <= 1 << 20 and 0.9 * (1 << 19) < num_bytes[1] <= 1 << 19
