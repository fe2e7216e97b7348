"""A few layers stand for all of a model: which ones are run, and what is made of their times."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM

from engine.core.batch import Batch, Phase
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.core.step_seconds import StepSeconds
from engine.model.planning import layer_trial
from engine.model.planning.estimate import Estimate, estimate
from engine.model.planning.layer_trial import depths_of, predict_steps
from engine.model.small_copy import keep_layers
from tests.engine.tiny_models import make_checkpoint, make_config


def sized(path: Path, num_layers: int, period: int, layer_bytes: int) -> Estimate:
    """An estimate of so many layers of that size, of which `period` hold one of each kind."""
    found = estimate(str(path))
    size = msgspec.structs.replace(found.size, layer_bytes=num_layers * layer_bytes, expert_bytes=0)
    return replace(found, num_layers=num_layers, num_distinct_layers=period, size=size)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.mark.parametrize(
    ("num_layers", "period", "layer_bytes", "depths"),
    [
        (48, 1, 30 << 20, (1, 34)),
        (12, 1, 30 << 20, (12,)),  # all fit
        (32, 1, 1 << 30, (1, 2)),
        (48, 6, 50 << 20, (6, 18)),
        (60, 6, 30 << 20, (6, 30)),
        (8, 6, 1 << 30, (8,)),  # two of each kind would be more than there are
    ],
)
def test_depths_hold_one_of_each_kind(
    checkpoint: Path, num_layers: int, period: int, layer_bytes: int, depths: tuple[int, ...]
) -> None:
    assert depths_of(sized(checkpoint, num_layers, period, layer_bytes)) == depths


@pytest.mark.parametrize(("num_layers", "layer_bytes"), [(24, 1 << 30), (3, 1)])
def test_further_layers_take_what_those_between_the_depths_take(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int, layer_bytes: int
) -> None:
    def load(_: EngineConfig, depth: int, *args: object) -> SimpleNamespace:
        return SimpleNamespace(
            num_layers=depth, run=lambda phase, size, _: 10.0 * (phase is Phase.PREFILL) + size * depth
        )

    monkeypatch.setattr(layer_trial, "_load", load)
    told = predict_steps(EngineConfig(model=str(checkpoint)), sized(checkpoint, num_layers, 1, layer_bytes), 512, 5)
    prefill = tuple((size, 10.0 + size * num_layers) for size in (16, 64, 256, 512, 2048))
    assert told == StepSeconds(prefill, tuple((size, float(size * num_layers)) for size in (1, 2, 4, 5)))


@pytest.mark.parametrize(
    ("prompt_tokens", "sizes"),
    [(7, [7, 2044]), (16, [16, 2048]), (1500, [16, 64, 256, 1024, 1500]), (5000, [16, 64, 256, 1024, 2048])],
)
def test_parts_of_prompts_whole_ones_and_several_are_tried(prompt_tokens: int, sizes: list[int]) -> None:
    assert layer_trial._prefill_sizes(prompt_tokens, 2048) == sizes


@pytest.mark.parametrize(("size", "spans"), [(24, [(0, 12), (0, 12)]), (12, [(0, 12)]), (4, [(4, 8)])])
def test_a_part_of_a_prompt_is_its_middle(size: int, spans: list[tuple[int, int]]) -> None:
    seen: list[Batch] = []
    runner: Any = SimpleNamespace(prefill=seen.append, decode=seen.append)
    trial = layer_trial._Trial(1, runner, layer_trial._Shape(12, 1), vocab_size=100, num_slots=0)
    trial.run(Phase.PREFILL, size, 0)
    [batch] = seen
    assert [(each.start, each.end) for each in batch.requests] == spans and batch.num_tokens == size
    assert len(set(batch.requests[0].token_ids)) == len(batch.requests[0].token_ids)  # or all choose the same experts
    trial.run(Phase.DECODE, 3, 0)
    trial.run(Phase.DECODE, 3, 1)
    assert [(each.start, each.end) for each in seen[1].requests] == [(12, 13)] * 3
    assert len({each.token_ids[0] for batch in seen[1:] for each in batch.requests}) == 6


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_layers_run_without_any_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(layer_trial, "_MAX_LAYER_BYTES", 1)
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    found = estimate(str(tmp_path))
    assert depths_of(found) == (1, 2)
    config = EngineConfig(model=str(tmp_path), quantization=quantization, device="cpu")
    told = predict_steps(config, found, 20, 3)
    assert all(seconds > 0 for _, seconds in (*told.prefill, *told.decode))


def test_layers_with_states_run(tmp_path: Path) -> None:
    path = make_checkpoint("lfm2", tmp_path)
    assert predict_steps(EngineConfig(model=str(path), device="cpu"), estimate(str(path)), 20, 2).decode[0][1] > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen2"])
def test_what_is_kept_are_the_first_layers(name: str) -> None:
    config = make_config(name)
    keep_layers(config, 2)
    module = AutoModelForCausalLM.from_config(config)
    assert module.config.num_hidden_layers == 2
    assert {number for key in module.state_dict() for number in key.split(".") if number.isdigit()} == {"0", "1"}


def test_a_part_that_cannot_be_built_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise RuntimeError("some setting forbids it")

    monkeypatch.setattr(layer_trial, "_load", load)
    with pytest.raises(ModelError, match="cannot be tried: some setting forbids it"):
        predict_steps(EngineConfig(model=str(checkpoint)), estimate(str(checkpoint)), 7, 1)
