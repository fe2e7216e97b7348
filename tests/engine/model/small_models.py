"""A small model with the embedded model's tokenizer, to draft for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import engine

EMBEDDED = Path(engine.__file__).parent / "embedded_model"


def save_small_model(directory: Path, **settings: Any) -> Path:
    """Saves a small model of random weights with the embedded model's tokenizer."""
    torch.manual_seed(1)
    base = json.loads((EMBEDDED / "config.json").read_text())
    narrow = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    config = LlamaConfig(**{**base, **narrow, "num_key_value_heads": 1, **settings})
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, directory)
    return directory
