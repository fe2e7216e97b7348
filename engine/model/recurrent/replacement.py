"""Replaces recurrent layers whose code computes on its own what mixes their tokens, with or without kernels."""

from torch import nn

from engine.model.known.same_code import is_of
from engine.model.recurrent.lightning_attention import LightningAttention
from engine.model.recurrent.real_gated_block import RealGatedBlock
from engine.weights.module_replacement import replace_modules

__all__ = ["replace_recurrent_layers"]


def replace_recurrent_layers(model: nn.Module) -> None:
    """Replaces layers of `model` whose code is known, in place. Raises UnsupportedModelError for weights that change
    what they compute."""
    replace_modules(model, _replacement)


def _replacement(layer: nn.Module) -> nn.Module | None:
    if is_of(layer, "minimax.MiniMaxLightningAttention"):
        return LightningAttention(layer)
    if is_of(layer, "recurrent_gemma.RecurrentGemmaRecurrentBlock"):
        return RealGatedBlock(layer)
    return None
