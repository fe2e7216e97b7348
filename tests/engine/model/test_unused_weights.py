"""Tensors of a checkpoint that its model does not use: refused where results would change, else ignored."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.errors import ModelError
from tests.engine.tiny_models import load_tiny


@pytest.mark.parametrize("name", ["q_proj.bias", "q_proj.weight_scale"])  # as beside weights of 8 bits
def test_weights_that_would_be_left_out_are_refused(llama: Path, name: str) -> None:
    add_tensor(llama, f"model.layers.1.self_attn.{name}")
    with pytest.raises(ModelError, match=rf"do not fit its config\.json: 1 tensors such as .*{name} have no place"):
        load_tiny(llama)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.layers.1.self_attn.masked_bias"])
def test_parts_that_are_not_used_may_be_there(llama: Path, name: str) -> None:
    add_tensor(llama, name)
    assert load_tiny(llama).vocab_size > 0


def add_tensor(checkpoint: Path, name: str) -> None:
    path = checkpoint / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(1)}, path, {"format": "pt"})
