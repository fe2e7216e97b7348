"""Replaces the layers of models with differential attention, whose code is known."""

from torch import nn

from engine.model.differential.attention import DifferentialAttention
from engine.model.known.same_code import is_of, rotate_of
from engine.weights.module_replacement import replace_modules

__all__ = ["replace_differential_attention"]


def replace_differential_attention(model: nn.Module) -> None:
    """Replaces attention of `model` in place where its code is known."""
    replace_modules(model, _replacement)


def _replacement(module: nn.Module) -> nn.Module | None:
    if not is_of(module, "diffllama.DiffLlamaAttention"):
        return None
    return DifferentialAttention(module, rotate_of(module))
