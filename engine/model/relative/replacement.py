"""Replaces the layers of models with a bias of scores by distance, whose code is known."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from torch import nn

from engine.model.known.same_code import is_of
from engine.model.relative.attention import RelativeAttention
from engine.model.relative.block_residual import BlockResidual
from engine.model.relative.gated_attention import DynamicShortConvolution, GatedRelativeAttention
from engine.model.relative.mixture import BoundedGate, NormalizingRouter, RelativeMixture
from engine.weights.module_replacement import replace_modules

__all__ = ["replace_relative_layers"]

Kinds = Mapping[str, Callable[[Any], nn.Module]]
_INNER: Kinds = {
    "inkling2.Inkling2DynamicShortConvolution": DynamicShortConvolution,
    "inkling2.Inkling2SoftcappedSwiGLU": BoundedGate,
    "inkling2.Inkling2TopKRouter": NormalizingRouter,
    "inkling2.Inkling2BlockAttentionResidual": BlockResidual,
}
_OUTER: Kinds = {
    "inkling.InklingAttention": RelativeAttention,
    "inkling.InklingMoE": RelativeMixture,
    "inkling2.Inkling2FullAttention": GatedRelativeAttention,
    "inkling2.Inkling2SlidingAttention": GatedRelativeAttention,
}
"""Layers that are known, by family and class, and what takes the place of each; of these some have inner ones."""


def replace_relative_layers(model: nn.Module) -> None:
    """Replaces the layers of `model` in place where their code is known."""
    for kinds in (_INNER, _OUTER):
        replace_modules(model, partial(_replacement, kinds))


def _replacement(kinds: Kinds, module: nn.Module) -> nn.Module | None:
    if is_of(module, "inkling2.Inkling2TopKRouter") and not isinstance(cast(Any, module).score_fn, nn.Sigmoid):
        return None
    return next((make(module) for name, make in kinds.items() if is_of(module, name)), None)
