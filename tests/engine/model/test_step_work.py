"""The bytes and operations of a model's steps agree with the shapes of its parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.kernels import load_kernels
from engine.model.step_work import expert_share
from tests.crossed import slow_but
from tests.engine.tiny_models import ARCHITECTURES, load_tiny, make_checkpoint

FLOAT = torch.float32.itemsize


def num_weights(path: Path) -> dict[str, int]:
    """Counts the numbers of all matrices that a token is multiplied by, by kind."""
    model = AutoModelForCausalLM.from_pretrained(path)
    counts = {"layers": 0, "experts": 0, "head": model.get_output_embeddings().weight.numel()}
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "embed" not in name and "lm_head" not in name:
            counts["experts" if ".experts." in name and parameter.dim() == 3 else "layers"] += parameter.numel()
    return counts


def test_sizes_of_a_dense_model(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    size, counts = load_tiny(path).size, num_weights(path)
    assert (size.layer_flops, size.head_flops) == (2 * counts["layers"], 2 * counts["head"])
    assert size.layer_bytes >= FLOAT * counts["layers"] and size.head_bytes >= FLOAT * counts["head"]
    assert (size.expert_bytes, counts["experts"]) == (0, 0)


def test_tokens_without_logits_need_the_last_layer_for_keys_and_values(tmp_path: Path) -> None:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    path = make_checkpoint("llama", tmp_path)
    size, last = load_tiny(path).size, AutoModelForCausalLM.from_pretrained(path).model.layers[-1]
    after_attention = (last.self_attn.o_proj, last.mlp.gate_proj, last.mlp.up_proj, last.mlp.down_proj)
    assert size.last_flops == 2 * sum(linear.weight.numel() for linear in after_attention)
    (attention,) = size.attention
    num_layers = last.self_attn.config.num_hidden_layers
    assert attention.flops_per_pair == (num_layers - 1) * attention.flops_per_scored_pair > 0


def test_models_with_recurrent_layers_compute_the_last_layer_for_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = ARCHITECTURES["lfm2"]
    types = ["conv", "conv", "full_attention"]
    monkeypatch.setitem(ARCHITECTURES, "lfm2", (kind, {**settings, "layer_types": types}))
    size = load_tiny(make_checkpoint("lfm2", tmp_path)).size
    assert size.last_flops == 0 and size.attention[0].flops_per_scored_pair == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_token_multiplies_by_the_experts_it_chooses(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(name, tmp_path)
    size, counts = load_tiny(path).size, num_weights(path)
    assert size.expert_share == 0.5
    assert size.layer_flops == 2 * counts["layers"] + counts["experts"]
    assert size.expert_bytes >= FLOAT * counts["experts"] > 0


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"num_experts": 8, "top_k_experts": 2}, 0.25),
        ({"num_local_experts": [4, 8], "num_experts_per_tok": [1, 2]}, 0.25),  # layer by layer
        ({"n_routed_experts": 8}, 0.125),
        ({"num_experts": 0, "num_experts_per_tok": None}, 1.0),
        ({}, 1.0),
    ],
)
def test_configurations_name_experts_in_many_ways(settings: dict[str, Any], share: float) -> None:
    assert expert_share(PreTrainedConfig(**settings)) == share


@pytest.mark.parametrize("name", slow_but(ARCHITECTURES, "llama", "gemma3", "gpt_oss", "deepseek_v3", "jamba"))
def test_every_weight_is_counted_once_at_most(name: str, tmp_path: Path) -> None:
    model = load_tiny(make_checkpoint(name, tmp_path))
    size, embedding = model.size, model.module.get_input_embeddings().weight.nbytes
    counted = size.layer_bytes + size.expert_bytes + size.head_bytes
    assert 0.5 * (model.weight_bytes - embedding) < counted <= model.weight_bytes - embedding
    assert size.head_bytes > 0


def test_fewer_bits_are_fewer_bytes_and_the_same_products(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    plain, quantized = load_tiny(path).size, load_tiny(path, quantization="int8").size
    assert quantized.layer_flops == plain.layer_flops
    assert quantized.layer_bytes < plain.layer_bytes


def test_layers_with_and_without_a_window_are_apart(tmp_path: Path) -> None:
    model = load_tiny(make_checkpoint("gemma2", tmp_path))
    windows = [attention.window for attention in model.size.attention]
    assert len(windows) == 2 and None in windows


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])  # values as long as keys, and not
def test_sizes_of_attention(name: str, tmp_path: Path) -> None:
    model = load_tiny(make_checkpoint(name, tmp_path))
    sizes, heads = model.size.attention, model.module.config.num_attention_heads
    assert sum(x.bytes_per_token for x in sizes) == sum(x.bytes_per_token(model.dtype) for x in model.layers)
    flops = sum(x.flops_per_pair + x.flops_per_scored_pair for x in sizes)
    assert flops == sum(2 * heads * (x.head_size + x.head_size_v) for x in model.layers)
