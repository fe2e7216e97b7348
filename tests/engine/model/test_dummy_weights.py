"""Random weights: made of config.json alone, where they are used, the same each time, and shown for what they are."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ModelError
from engine.model import dummy_weights
from engine.model.drafting import mtp_head
from engine.model.loader import load_model
from engine.model.setup import load_model_runner
from engine.runner.loaded_model import LoadedModel
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.tiny_models import make_config, tiny_engine

NAMES = ("llama", "gemma2", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_moe", "lfm2")


def make_folder(name: str, path: Path) -> Path:
    """Writes config.json, and nothing else."""
    make_config(name).save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return path


def load(path: Path, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", load_format="dummy", **settings))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_runs_without_weights(name: str, tmp_path: Path) -> None:
    engine = tiny_engine(load(make_folder(name, tmp_path), dtype="float32"))
    add(engine, "a", [3, 1, 4, 1, 5], max_tokens=6, ignore_eos=True, logprobs=1)
    assert len(tokens_of(run_to_end(engine)["a"])) == 6


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_random_weights_are_packed_as_others(settings: dict[str, str], tmp_path: Path) -> None:
    engine = tiny_engine(load(make_folder("llama", tmp_path), **settings))
    add(engine, "a", [3, 1, 4, 1, 5], max_tokens=3, ignore_eos=True)
    assert len(tokens_of(run_to_end(engine)["a"])) == 3


def test_weights_are_the_same_each_time(tmp_path: Path) -> None:
    make_folder("llama", tmp_path)
    one = load(tmp_path).weights_fingerprint
    torch.manual_seed(77)
    assert load(tmp_path).weights_fingerprint == one


def test_matrices_are_small_and_norms_do_nothing() -> None:
    config, before = make_config("llama"), torch.random.get_rng_state()
    model = dummy_weights.dummy_model(config, torch.float32, torch.device("cpu"), trust_remote_code=False)
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's random numbers change
    for name, parameter in model.requires_grad_(False).named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert math.isclose(parameter.std(), config.initializer_range, rel_tol=0.1)


def test_weights_are_made_on_their_device() -> None:
    device = torch.device("meta")  # what is made elsewhere is not on it
    model = dummy_weights.dummy_model(make_config("llama"), torch.bfloat16, device, trust_remote_code=False)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_what_is_on_the_disk_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (make_folder("llama", tmp_path) / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError):
        load_model(EngineConfig(model=str(tmp_path), device="cpu"))
    monkeypatch.setattr(mtp_head, "brings_head", pytest.fail)
    kept = tmp_path / "packed"
    config = EngineConfig(model=str(tmp_path), load_format="dummy", packed_cache=str(kept), kv_cache_bytes=1 << 20)
    _, info = load_model_runner(config)
    assert info.load_format == "dummy" and not kept.exists()


def test_the_log_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(make_folder("llama", tmp_path))
    assert "random numbers, so its answers mean nothing" in caplog.text


def test_no_model_drafts_for_random_weights() -> None:
    with pytest.raises(ConfigError, match="--draft-model: no draft is right about random weights"):
        EngineConfig(model="m", load_format="dummy", draft_model="d")
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy"):
        EngineConfig(model="m", load_format="random")


def test_a_published_precision_is_that_of_weights_that_are_not_there(tmp_path: Path) -> None:
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    file = make_folder("llama", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": scheme}))
    plain = load(make_folder("llama", tmp_path / "plain"))
    assert load(tmp_path).dtype is plain.dtype
