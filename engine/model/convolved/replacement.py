"""Replaces the layers of models with convolved queries and keys, whose code is known."""

from typing import Any, cast

from torch import nn

from engine.model.convolved.projection import ConvolvedProjection, LengthNorm
from engine.model.known.same_code import is_of
from engine.weights.module_replacement import replace_modules

__all__ = ["replace_convolved_projections"]


def replace_convolved_projections(model: nn.Module) -> None:
    """Replaces the layers of `model` in place where their code is known."""
    replace_modules(model, _replacement)


def _replacement(module: nn.Module) -> nn.Module | None:
    if is_of(module, "zaya.ZayaQKNorm"):
        return LengthNorm(module)
    return (
        ConvolvedProjection(module) if is_of(module, "zaya.ZayaCCAProjection") and _begins_with_zero(module) else None
    )


def _begins_with_zero(projection: nn.Module) -> bool:
    """Whether the half of a value is zero that the first token has of none before it."""
    return cast(Any, projection).v_proj_delayed.bias is None
