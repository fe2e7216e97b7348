"""Numbers that no model has are refused by name, before anything is made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.checkpoint.config_numbers import check_numbers, num_layers
from engine.checkpoint.local import check_checkpoint
from engine.checkpoint.weight_files import check_weights
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.model.loader import load_model
from engine.model.weight_count import check_weight_count
from tests.engine.tiny_models import make_checkpoint

IMPOSSIBLE: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**6},
    {"num_hidden_layers": -1},
    {"n_layer": 4097},
    {"text_config": {"num_hidden_layers": 10**6}},
    {"num_experts": 10**6},
    {"max_position_embeddings": 2**31},
    {"rope_theta": 0},
    {"rope_theta": -1.0},
    {"rope_theta": 10**400},
    {"rope_parameters": {"rope_theta": float("nan")}},
    {"rope_parameters": {"full_attention": {"rope_theta": float("inf")}}},
    {"rms_norm_eps": -1e-6},
    {"layer_norm_epsilon": float("nan")},
    {"whatever": 2**63},
]
POSSIBLE: list[dict[str, Any]] = [
    {"num_hidden_layers": 4096, "rope_theta": 1e12, "rms_norm_eps": 0.0, "max_position_embeddings": 2**31 - 1},
    {"time_step_limit": [0.0, float("inf")], "a": float("nan"), "b": 1e308, "c": True, "d": None, "e": "x"},
    {"rope_scaling": {"factor": 32.0, "original_max_position_embeddings": 8192}},
    {"model_max_length": int(1e30)},
    {"sizes": {1225: 128, 4900: 2**63}},
]


@pytest.mark.parametrize("config", IMPOSSIBLE, ids=json.dumps)
def test_what_no_model_has_is_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"^config.json of m: \w+ is .*; mend it\.$"):
        check_numbers(config, "m")


@pytest.mark.parametrize("config", POSSIBLE, ids=json.dumps)
def test_what_models_have_passes(config: dict[str, Any]) -> None:
    check_numbers(config, "m")


def test_nesting_is_followed_as_deep_as_configurations_are() -> None:
    deep: dict[str, Any] = {"num_layers": 7}
    for _ in range(10**4):
        deep = {"inner": deep}
    check_numbers(deep, "m")
    assert num_layers(deep) == 0 and num_layers({"text_config": {"num_layers": 7}, "n_layer": 3}) == 7


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "llama")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def load(folder: Path) -> None:
    check_checkpoint(str(folder))
    check_weights(str(folder))
    load_model(EngineConfig(model=str(folder), device="cpu"))


def test_more_layers_than_tensors_are_not_made(llama: Path) -> None:
    change_config(llama, num_hidden_layers=1000)
    with pytest.raises(ModelError, match="it names 1000 layers, and they have 30 tensors"):
        load(llama)


@pytest.mark.parametrize("name", ["vocab_size", "head_dim", "intermediate_size", "num_key_value_heads"])
def test_more_weights_than_the_files_can_hold_are_not_made(llama: Path, name: str) -> None:
    change_config(llama, **{name: 10**8})
    with pytest.raises(ModelError, match=r"it describes [\d,]+ weights, more than [\d,]+ bytes can hold"):
        load(llama)


def test_a_dtype_of_eight_bits_in_the_config_says_nothing_of_the_count(llama: Path) -> None:
    """Some checkpoints in FP8 name it, and torch makes no tensors of it by default."""
    change_config(llama, dtype="float8_e4m3fn")
    config = EngineConfig(model=str(llama), device="cpu")
    check_weight_count(config, AutoConfig.from_pretrained(llama))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_refused_by_name(llama: Path, value: str, dtype: torch.dtype) -> None:
    weights = {name: weight.to(dtype) for name, weight in load_file(llama / "model.safetensors").items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float(value)
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"damaged: model\.layers\.1\.mlp\.up_proj\.weight has NaN or infinity"):
        load(llama)


def test_finite_weights_may_add_up_to_infinity(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["lm_head.weight"][:2] = 3e38
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    load(llama)
