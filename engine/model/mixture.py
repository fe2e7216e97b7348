"""Mixtures of experts whose routers are known, so that the C++ layers run them."""

from typing import Any, cast

from torch import nn

from engine.model import code_fingerprint
from engine.model.decoder_parts import MixtureParts, linear_parts
from engine.weights.moe import PackedExperts, RouterWeight
from engine.weights.packed_weight import KernelWeight

__all__ = ["is_known_mixture", "mixture_parts", "router_weight"]


def is_known_mixture(module: nn.Module) -> bool:
    """Whether nothing but a known router and experts in the kernels runs when the module is called."""
    if not code_fingerprint.is_mixture(module):
        return False
    router, experts = _router(module), module.experts
    kinds = (
        code_fingerprint.is_normalizing_router,
        code_fingerprint.is_rounding_router,
        code_fingerprint.is_late_router,
    )
    is_router_known = any(is_of_kind(router) for is_of_kind in kinds)
    has_weight = isinstance(router.weight, RouterWeight) and isinstance(router.weight.packed, KernelWeight)
    return is_router_known and has_weight and isinstance(experts, PackedExperts) and experts.kernel is not None


def router_weight(mixture: Any) -> KernelWeight:
    """The packed weight of a known mixture's router."""
    return cast(KernelWeight, _router(mixture).weight.packed)


def mixture_parts(mixture: Any) -> MixtureParts:
    """Returns the parts of a known mixture."""
    router = _router(mixture)
    is_rounded = code_fingerprint.is_rounding_router(router)
    is_normalized = bool(router.norm_topk_prob) if is_rounded else True
    weight = linear_parts(router_weight(mixture), getattr(router, "bias", None))
    is_late = code_fingerprint.is_late_router(router)
    return MixtureParts(weight, router.top_k, is_late, is_normalized, is_rounded, mixture.experts.parts)


def _router(mixture: Any) -> Any:
    return mixture.router if hasattr(mixture, "router") else mixture.gate
