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
    router, experts = cast(nn.Module, module.gate), module.experts
    is_router_known = code_fingerprint.is_normalizing_router(router) or code_fingerprint.is_rounding_router(router)
    has_weight = isinstance(router.weight, RouterWeight) and isinstance(router.weight.packed, KernelWeight)
    return is_router_known and has_weight and isinstance(experts, PackedExperts) and experts.kernel is not None


def router_weight(mixture: Any) -> KernelWeight:
    """The packed weight of a known mixture's router."""
    return cast(KernelWeight, mixture.gate.weight.packed)


def mixture_parts(mixture: Any) -> MixtureParts:
    """Returns the parts of a known mixture."""
    router = mixture.gate
    is_rounded = code_fingerprint.is_rounding_router(router)
    is_normalized = bool(router.norm_topk_prob) if is_rounded else True
    weight = linear_parts(router_weight(mixture), None)
    return MixtureParts(weight, router.top_k, is_normalized, is_rounded, mixture.experts.parts)
