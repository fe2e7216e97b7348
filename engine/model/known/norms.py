"""Norms of known models: which have no weight, and the parts of fused ones."""

from typing import Any

from engine.model.decoder_parts import NormParts
from engine.model.fused_modules import FusedNorm, FusedRMSNorm
from engine.model.known.code_fingerprint import norms_rotated_heads
from engine.model.known.kv_sources import norms_values
from engine.model.known.router import is_scaling_router

__all__ = ["norm_parts", "norm_without_weight"]


def norm_without_weight(owner: Any) -> tuple[str, int]:
    """Returns the name of a module's norm that has no weight, and the size of what it norms; "" if it has none."""
    if is_scaling_router(owner):
        return "norm", int(owner.hidden_size)
    if norms_rotated_heads(owner):
        return "qk_norm", int(owner.head_dim)
    return ("v_norm", int(owner.head_dim)) if norms_values(owner) else ("", 0)


def norm_parts(norm: FusedNorm) -> NormParts:
    """Returns the parts of a norm."""
    weight = norm.weight.detach()
    if isinstance(norm, FusedRMSNorm):
        return NormParts(weight, norm.eps)
    return NormParts(weight, norm.eps, True, None if norm.bias is None else norm.bias.detach())
