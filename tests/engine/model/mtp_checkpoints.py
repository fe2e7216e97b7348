"""Tiny checkpoints that bring an MTP head, named as published ones are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from engine.core.config import EngineConfig
from engine.engine import Engine
from engine.model.drafting.mtp_head import load_mtp_head
from engine.model.loader import load_model
from engine.model.setup import load_model_runner
from engine.runner.loaded_model import LoadedModel
from tests.engine.model.always_drafting import let_always_draft
from tests.engine.tiny_models import COMMON, VOCAB_SIZE, make_config, tiny_engine

NUM_LAYERS, HIDDEN_SIZE = COMMON["num_hidden_layers"], COMMON["hidden_size"]
_GLM = {
    **{"head_dim": 16, "use_qk_norm": True, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
_MELLUM = {
    **{"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": 12},
    **{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_mtp_layers": 1},
}
_DELTA = {
    **{"layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 16, "num_mtp_layers": 1},
    "mtp_layer_types": ["full_attention"],
    **{"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
_OWN = {
    "glm4_moe": ("Glm4MoeConfig", _GLM),
    "mellum": ("MellumConfig", _MELLUM),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []},
    ),
}

DEEPSEEK = {
    "": f"model.layers.{NUM_LAYERS}.",
    **{"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"},
    "layer": "",
}
QWEN = {
    "": "mtp.",
    **{"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "projection": "fc"},
    **{"norm": "norm", "layer": "layers.0."},
}
MIMO = {
    "": "model.mtp_layers.0.",
    **{"embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "projection": "input_proj"},
    **{"norm": "final_layernorm", "layer": ""},
}
KINDS = {
    **{"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "mellum": QWEN, "llama": DEEPSEEK, "qwen2": MIMO},
    **{"qwen3_5": QWEN, "qwen3_next": QWEN, "deepseek_v32": DEEPSEEK},
}
"""Architecture -> what the parts of its head are called."""

Tensors = dict[str, Tensor]


def config_of(architecture: str, **settings: Any) -> PreTrainedConfig:
    if architecture in _OWN:
        name, own = _OWN[architecture]
        config = getattr(transformers, name)(**{**COMMON, **own})
    else:
        config = make_config(architecture)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def with_one_layer_more(architecture: str) -> PreTrainedConfig:
    config = config_of(architecture)
    lists = {name: each for name, each in vars(config).items() if isinstance(each, list) and len(each) == NUM_LAYERS}
    for name, each in lists.items():
        setattr(config, name, [*each, *(getattr(config, f"mtp_{name}", None) or each[-1:])])
    config.num_hidden_layers = NUM_LAYERS + 1
    return config


def randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in key:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def make_checkpoint_with_head(
    architecture: str, directory: Path, edit: Callable[[Tensors, dict[str, str]], None] = lambda tensors, names: None
) -> Path:
    """Writes a checkpoint of random weights, with a head named as those of its kind are. `edit` may change its tensors,
    which are all that is saved, knowing the names of the head's parts."""
    torch.manual_seed(7)
    names = KINDS[architecture]
    config, prefix = config_of(architecture), names[""]
    model = transformers.AutoModelForCausalLM.from_config(with_one_layer_more(architecture))
    randomize(model)
    path = directory / architecture
    model.save_pretrained(path)
    own = f"model.layers.{NUM_LAYERS}."
    tensors = {
        name.replace(own, f"{prefix}{names['layer']}"): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    for part in ("embedding_norm", "hidden_norm", "norm"):
        tensors[f"{prefix}{names[part]}.weight"] = 1 + 0.1 * torch.randn(HIDDEN_SIZE)
    tensors[f"{prefix}{names['projection']}.weight"] = 0.3 * torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    if names is DEEPSEEK:  # which repeats what is shared
        tensors |= {
            f"{prefix}shared_head.head.weight": tensors["lm_head.weight"].clone(),
            f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        }
    edit(tensors, names)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    return path


def make_twin(tensors: Tensors, names: dict[str, str]) -> None:
    """Makes the head predict nearly what the model does: only the model's last layer adds much, the head's is a
    copy of it, and its projection gives back the embedding, and a little of the hidden state."""
    prefix, last = names[""], f"model.layers.{NUM_LAYERS - 1}."
    for name in [*tensors]:
        is_before = name.startswith("model.layers.") and not name.startswith((last, prefix))
        if is_before and name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            tensors[name] *= 0.001 if "linear_attn" in name else 0.0  # states matter to the bits
        if name.startswith(last):
            tensors[f"{prefix}{names['layer']}{name.removeprefix(last)}"] = tensors[name].clone()
    embeddings = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    tensors["model.embed_tokens.weight"] = embeddings / embeddings.square().mean(1, keepdim=True).sqrt()
    for part in ("embedding_norm", "hidden_norm"):
        neutral = tensors["model.norm.weight"].mean().round()  # 0 in models that add 1 to it
        tensors[f"{prefix}{names[part]}.weight"] = torch.full((HIDDEN_SIZE,), float(neutral))
    tensors[f"{prefix}{names['norm']}.weight"] = tensors["model.norm.weight"].clone()
    halves = [torch.eye(HIDDEN_SIZE), 0.003 * torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)]
    tensors[f"{prefix}{names['projection']}.weight"] = torch.cat(halves[::-1] if names is MIMO else halves, 1)


def load_with_head(path: Path, dtype: str = "bfloat16", **settings: Any) -> LoadedModel:
    config = EngineConfig(model=str(path), device="cpu", dtype=dtype, **settings)
    model = load_model(config)
    head = load_mtp_head(config, model)
    assert head is not None
    return replace(model, draft=head)


def always_drafting(model: LoadedModel, length: int = 3, **settings: Any) -> Engine:
    return let_always_draft(tiny_engine(model, num_speculative_tokens=8, **settings), length)


def has_head_beside(path: Path, name: str, weight: Tensor) -> bool:
    """Adds a tensor that is no part of the model to a checkpoint, and loads it; returns whether it has a head then."""
    file = path / "model.safetensors"
    save_file({**load_file(file), name: weight}, file, metadata={"format": "pt"})
    _, info = load_model_runner(EngineConfig(model=str(path), device="cpu", num_blocks=8, max_model_len=128))
    return info.has_head
