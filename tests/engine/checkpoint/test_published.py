"""Checkpoints in published precisions answer as transformers does with the numbers that the files store."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.weight_source import stored_weights
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.model.loader import load_model
from tests.engine.checkpoint.published_checkpoints import METHODS, write_published
from tests.engine.golden_tokens import generate, generated, prompts
from tests.engine.tiny_models import ReferenceModel, load_tiny, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def architecture_of(method: str) -> str:
    return "gpt_oss" if method == "mxfp4" else "qwen3"


@pytest.mark.parametrize("method", METHODS)
def test_stored_numbers_are_those_of_the_definition(method: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture_of(method), tmp_path)
    write_published(path, method)
    expected = load_file(path / "reference" / "model.safetensors")
    weights = stored_weights(str(path), None, torch.float32)
    assert weights is not None and weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight.clone().numpy(), expected[name].numpy(), rtol=2e-7, atol=0, err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_equal_those_of_transformers(method: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture_of(method), tmp_path)
    reference = ReferenceModel(write_published(path, method))
    model = load_tiny(path, "auto" if method != "mxfp4" else "float32")
    assert model.dtype is torch.float32, "16 bits would round"
    expected = [generated(reference, prompt) for prompt in prompts()]
    assert generate(model, 4, 7, caching=True, is_tight=True) == expected


@pytest.mark.parametrize("method", ["fp8 in blocks", "gptq", "awq"])
def test_experts_that_are_matrices_of_their_own_are_joined(method: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path)
    reference = ReferenceModel(write_published(path, method))
    assert any(".experts.3.down_proj" in name for name in load_file(path / "model.safetensors"))
    expected = [generated(reference, prompt) for prompt in prompts()]
    assert generate(load_tiny(path, "auto"), 4, 7, caching=True, is_tight=True) == expected


def test_a_scheme_inside_the_text_configuration_counts(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"] = {"quantization_config": {"quant_method": "hqq"}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantized \(hqq\)"):
        load_model(EngineConfig(model=str(path)))


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("gptq", {"bits": 3}, "3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin'"),
        ("awq", {"version": "gemv"}, "'gemv'"),
        ("w4a16", {"format": "nvfp4-pack-quantized"}, "nvfp4"),
        ("w4a16", {"sparsity_config": {"format": "dense"}}, "sparse"),
        ("fp8 in blocks", {"weight_block_size": "all"}, "'all'|all"),
        ("fp8 in blocks", {"quant_method": "quark"}, "quark"),
        ("fp8 in blocks", {"quant_method": "gptq", "bits": 4}, "not known what it stands for"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    method: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path)
    write_published(path, method, changes)
    with pytest.raises(ModelError, match=reason):
        load_model(EngineConfig(model=str(path)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["first", "last"])
def test_tensors_of_another_shape_are_refused(method: str, part: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture_of(method), tmp_path)
    write_published(path, method)
    tensors = load_file(path / "model.safetensors")
    stem = "mlp.experts.down_proj" if method == "mxfp4" else "self_attn.k_proj"
    stem = "mlp.experts.gate_up_proj" if method == "mxfp4" else stem
    names = sorted(name for name in tensors if f"layers.1.{stem}" in name and tensors[name].dim() > 0)
    names = [name for name in names if not name.endswith(("_bias", "weight_shape", "quant_map"))]
    name = names[0 if part == "first" else -1]
    tensors[name] = torch.cat([tensors[name], tensors[name][:3]])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError):
        load_model(EngineConfig(model=str(path)))
