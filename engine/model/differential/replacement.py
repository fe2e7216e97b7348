"""Replaces the layers of models with differential attention, whose code is known."""

from typing import cast

from torch import nn

from engine.model.differential.attention import DifferentialAttention, Rotate
from engine.model.known.same_code import global_of, is_of
from engine.weights.module_replacement import replace_modules

__all__ = ["replace_differential_attention"]


def replace_differential_attention(model: nn.Module) -> None:
    """Replaces attention of `model` in place where its code is known."""
    replace_modules(model, _replacement)


def _replacement(module: nn.Module) -> nn.Module | None:
    if not is_of(module, "diffllama.DiffLlamaAttention"):
        return None
    rotate = cast(Rotate, global_of(type(module).forward, "apply_rotary_pos_emb"))
    return DifferentialAttention(module, rotate)
