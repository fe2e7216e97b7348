"""Tiny EAGLE-3 heads of random weights, and models for them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.config import EngineConfig
from engine.model.drafting.draft_model import load_draft_model
from engine.model.loader import load_model
from engine.runner.loaded_model import LoadedModel
from tests.engine.tiny_models import COMMON, VOCAB_SIZE, make_checkpoint

HIDDEN_SIZE, NUM_LAYERS = COMMON["hidden_size"], COMMON["num_hidden_layers"]
DRAFTED = (3, 17, 18, 60, 120)
"""The tokens that heads draft, and that models which they fit prefer."""
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, INNER_SIZE = 4, 2, 16, 48
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_SIZE,
    "intermediate_size": INNER_SIZE,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": len(DRAFTED),
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "transformer_layer_config": LAYER,
}


def make_target(architecture: str, directory: Path) -> Path:
    """Writes a model that mostly answers with drafted tokens."""
    path = make_checkpoint(architecture, directory)
    tensors = load_file(path / "model.safetensors")
    if "lm_head.weight" in tensors:
        kept = torch.zeros(VOCAB_SIZE, 1).index_fill(0, torch.tensor(DRAFTED), 1.0)
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * (0.02 + kept)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def head_tensors(num_layers: int = 3) -> dict[str, Tensor]:
    """Returns random tensors, named as the `speculators` package does."""
    torch.manual_seed(11)
    sizes = {
        "fc": (HIDDEN_SIZE, num_layers * HIDDEN_SIZE),
        "layers.0.self_attn.q_proj": (NUM_HEADS * HEAD_SIZE, 2 * HIDDEN_SIZE),
        "layers.0.self_attn.k_proj": (NUM_KV_HEADS * HEAD_SIZE, 2 * HIDDEN_SIZE),
        "layers.0.self_attn.v_proj": (NUM_KV_HEADS * HEAD_SIZE, 2 * HIDDEN_SIZE),
        "layers.0.self_attn.o_proj": (HIDDEN_SIZE, NUM_HEADS * HEAD_SIZE),
        "layers.0.mlp.gate_proj": (INNER_SIZE, HIDDEN_SIZE),
        "layers.0.mlp.up_proj": (INNER_SIZE, HIDDEN_SIZE),
        "layers.0.mlp.down_proj": (HIDDEN_SIZE, INNER_SIZE),
        "lm_head": (len(DRAFTED), HIDDEN_SIZE),
    }
    tensors = {f"{name}.weight": 0.3 * torch.randn(size) for name, size in sizes.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in (*(f"layers.0.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN_SIZE)
    tensors["d2t"] = torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(DRAFTED), True)
    return tensors


def write_head(
    directory: Path, tensors: Mapping[str, Tensor] | None = None, config: Mapping[str, Any] | None = None
) -> Path:
    """Writes a head; `config` changes its configuration."""
    path = directory / "head"
    path.mkdir(parents=True)
    save_file(dict(tensors or head_tensors()), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | dict(config or {})))
    return path


def load_with_eagle(target: Path, head: Path, dtype: str = "bfloat16", **settings: Any) -> LoadedModel:
    config = EngineConfig(model=str(target), draft_model=str(head), device="cpu", dtype=dtype, **settings)
    model = load_model(config)
    return replace(model, draft=load_draft_model(config, model, model.max_model_len))
