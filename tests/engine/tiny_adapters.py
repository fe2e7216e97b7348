"""Random adapters in PEFT's format over tiny models, and models into which their definition merges them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.checkpoint.adapters.settings import read_settings
from tests.engine.tiny_models import ReferenceModel

__all__ = ["linear_layers", "make_adapter", "merge", "rewrite", "settings_of"]

LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def settings_of(rank: int = 4, **changes: Any) -> dict[str, Any]:
    """Returns the settings that PEFT 0.18 writes, with these changes."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "some/model",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": 12,
        "lora_bias": False,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.18.0",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": {},
        "target_modules": [*LLAMA_TARGETS],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **changes,
    }


def make_adapter(
    path: Path,
    model: ReferenceModel,
    seed: int = 0,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Writes an adapter of the model's linear layers that its settings name, and returns its directory."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(settings_of(**changes)))
    settings, generator = read_settings(path), torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_out, num_in) in linear_layers(model).items():
        if settings.means(name):
            rank = settings.rank_of(name)
            for matrix, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                key = f"base_model.model.{name}.lora_{matrix}.weight"
                tensors[key] = (torch.randn(shape, generator=generator) * std).to(dtype)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Changes the tensors of an adapter."""
    file = path / "adapter_model.safetensors"
    save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file)


def merge(model: ReferenceModel, path: Path) -> ReferenceModel:
    """Adds scale * BA to the model's own weights: for each row x, W x + scale * B(A x). Returns the model."""
    settings = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            short = name.rpartition(".")[2]
            rank = settings["rank_pattern"].get(short, settings["r"])
            alpha = settings["alpha_pattern"].get(short, settings["lora_alpha"])
            scale = alpha / (rank**0.5 if settings["use_rslora"] else rank)
            change = scale * tensors[key.replace("lora_A", "lora_B")].float() @ tensors[key].float()
            module: Any = model.model.get_submodule(name)
            module.weight.data += change.T if isinstance(module, Conv1D) else change
    return model


def linear_layers(model: ReferenceModel) -> dict[str, tuple[int, int]]:
    """Returns the output and input features of the model's linear layers."""
    shapes = {}
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            num_out, num_in = module.weight.shape[:: -1 if isinstance(module, Conv1D) else 1]
            shapes[name] = num_out, num_in
    return shapes
