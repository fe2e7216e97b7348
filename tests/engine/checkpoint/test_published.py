"""Checkpoints in published precisions answer as transformers does with the numbers that the files store."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.weight_source import stored_weights
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from engine.kernels import load_kernels
from engine.model.loader import load_model
from engine.weights.block_weight import BlockWeight
from tests.crossed import slow_but
from tests.engine.checkpoint.published_checkpoints import METHODS, write_published
from tests.engine.golden_tokens import generate, generated, prompts
from tests.engine.tiny_models import ReferenceModel, load_tiny, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


_QUARK_UINT4 = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": 1, "group_size": 8}


def architecture_of(method: str) -> str:
    return "gpt_oss" if method == "mxfp4" else "qwen3"


IN_TOKENS = (
    "fp8 in blocks",
    "gptq in another order",
    "awq",
    "w4a16 with zeros",
    "bitsandbytes int8",
    "quark uint4",
    "nf4",
    "mxfp4",
    "nvfp4",
)
"""Methods whose numbers are multiplied in ways that differ, for tests of a whole model's tokens."""


@pytest.mark.parametrize("method", METHODS)
def test_stored_numbers_are_those_of_the_definition(method: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture_of(method), tmp_path)
    write_published(path, method)
    expected = load_file(path / "reference" / "model.safetensors")
    weights = stored_weights(str(path), None, torch.float32)
    assert weights is not None and weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight.clone().numpy(), expected[name].numpy(), rtol=2e-7, atol=0, err_msg=name)


@pytest.mark.parametrize("method", slow_but(METHODS, *IN_TOKENS))
def test_tokens_equal_those_of_transformers(method: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture_of(method), tmp_path)
    reference = ReferenceModel(write_published(path, method))
    model = load_tiny(path, "float32" if "mxfp4" in method else "auto")
    assert model.dtype is torch.float32, "16 bits would round"
    expected = [generated(reference, prompt) for prompt in prompts()]
    assert generate(model, 4, 7, caching=True, is_tight=True) == expected


@pytest.mark.parametrize(
    ("method", "others", "expected"),
    [
        ("mxfp4", {}, torch.bfloat16),
        ("quark mxfp4", {}, torch.bfloat16),
        ("quark mxfp4", {"*down_proj": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}, torch.float32),
        ("quark fp8", {}, torch.float32),
    ],
)
def test_numbers_times_powers_of_two_are_kept_in_16_bits(
    method: str, others: dict[str, Any], expected: torch.dtype, tmp_path: Path
) -> None:
    path = make_checkpoint(architecture_of(method), tmp_path)
    write_published(path, method, {"layer_quant_config": others})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert load_tiny(path, "auto").dtype is expected


@pytest.mark.parametrize("method", ["fp8 in blocks", "gptq", "awq", "nvfp4", "modelopt"])
def test_experts_that_are_matrices_of_their_own_are_joined(method: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path)
    reference = ReferenceModel(write_published(path, method))
    assert any(".experts.3.down_proj" in name for name in load_file(path / "model.safetensors"))
    expected = [generated(reference, prompt) for prompt in prompts()]
    assert generate(load_tiny(path, "auto"), 4, 7, caching=True, is_tight=True) == expected


@pytest.mark.parametrize("method", ["nvfp4", "modelopt"])
def test_nvfp4_stays_in_the_bits_of_the_file(method: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    write_published(path, method)
    load_kernels()
    linears = {name: each for name, each in load_tiny(path, "auto").module.named_modules() if hasattr(each, "packed")}
    assert len(linears) > 3
    for name, linear in linears.items():
        assert isinstance(linear.packed, BlockWeight) == (name != "lm_head"), name


@pytest.mark.parametrize("num_groups", [1, 3])
def test_scales_of_other_columns_are_refused(num_groups: int, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    write_published(path, "nvfp4")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    tensors[name] = tensors[name].view(torch.uint8).repeat(1, 2)[:, :num_groups].contiguous().view(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="groups of 16 do not make 32 columns"):
        stored_weights(str(path), None, torch.float32)


@pytest.mark.parametrize("is_quantized", [True, False])
def test_the_scheme_of_modelopt_may_lie_beside_the_configuration(is_quantized: bool, tmp_path: Path) -> None:
    """Without `quant_algo` it is about keys and values alone."""
    path = make_checkpoint("llama", tmp_path)
    if is_quantized:
        write_published(path, "modelopt")
    config = json.loads((path / "config.json").read_text())
    algorithm = config.pop("quantization_config", {}).get("quant_algo")
    (path / "config.json").write_text(json.dumps(config))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    weights = stored_weights(str(path), None, torch.float32)
    assert (weights is not None) == is_quantized
    load_tiny(path)
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError, match="W4A8_AWQ"):
        load_tiny(path)


@pytest.mark.parametrize(
    ("method", "name"), [("fp8 by tensor", "activation_scale"), ("modelopt with fp8", "input_scale")]
)
def test_scales_of_activations_round_nothing(method: str, name: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    reference = ReferenceModel(write_published(path, method, {"activation_scheme": "static"}))
    tensors = load_file(path / "model.safetensors")
    tensors |= {each.replace("weight", name): torch.tensor(9.0) for each in tensors if each.endswith("k_proj.weight")}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    expected = [generated(reference, prompt) for prompt in prompts()]
    assert generate(load_tiny(path, "auto"), 4, 7, caching=True, is_tight=True) == expected


def test_scales_of_keys_and_values_round_nothing(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    reference = ReferenceModel(write_published(path, "modelopt"))
    tensors = load_file(path / "model.safetensors")
    scales = ("k_proj.k_scale", "v_proj.v_scale", "q_scale", "k_scale", "v_scale")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in scales}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
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
        ("w4a16", {"format": "mxfp4-pack-quantized"}, "mxfp4"),
        ("nvfp4", {"format": "pack-quantized"}, "4 bits"),
        ("w4a16", {"format": "nvfp4-pack-quantized"}, "4 bits"),
        ("nvfp4", {"transform_config": {"R1": {}}}, "transformed"),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
        ("modelopt", {"group_size": 32}, "groups of 32"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"q": {"quant_algo": "MXFP8"}}}, "'MXFP8'"),
        ("w4a16", {"sparsity_config": {"format": "dense"}}, "sparse"),
        ("fp8 in blocks", {"weight_block_size": "all"}, "'all'|all"),
        ("fp8 in blocks", {"quant_method": "hqq"}, "hqq"),
        ("quark fp8", {"global_quant_config": {"weight": {"dtype": "fp8_e5m2", "qscheme": "per_tensor"}}}, "fp8_e5m2"),
        ("quark fp8", {"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}}, "description"),
        ("quark int4", {"global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_tensor"}}}, "not as quark"),
        ("quark int4", {"layer_type_quant_config": {"x": {"weight": _QUARK_UINT4}}}, "differ in their integers"),
        ("quark fp8", {"layer_quant_config": {"*k_proj": {"weight": {"dtype": "mx6"}}}}, "mx6"),
        ("quark fp8", {"algo_config": [{"name": "rotation"}]}, "'rotation'"),
        ("quark fp8", {"export": {"weight_format": "fake_quantized"}}, "'fake_quantized'"),
        ("quark int4", {"export": {"pack_method": "zigzag"}}, "zigzag"),
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
    names = [name for name in names if not name.endswith(("_bias", "weight_shape", "quant_map", "input_global_scale"))]
    name = names[0 if part == "first" else -1]
    tensors[name] = torch.cat([tensors[name], tensors[name][:3]])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError):
        load_model(EngineConfig(model=str(path)))
