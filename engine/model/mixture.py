"""Mixtures of experts whose routers are known, as the C++ layers run them: router, experts and their weighted sum."""

from typing import Any, cast

import torch
from torch import nn

from engine.model import code_fingerprint
from engine.weights.moe import PackedExperts, RouterWeight
from engine.weights.packed_weight import KernelWeight

__all__ = ["is_known_mixture", "kernel_mixture", "router_weight"]


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


def kernel_mixture(mixture: Any) -> Any:
    """Returns a known mixture as the C++ layers take it."""
    router, classes, packed = mixture.gate, torch.classes.twostep, router_weight(mixture)
    is_rounded = code_fingerprint.is_rounding_router(router)
    weight = classes.Linear(packed.packed, None, packed.shape[0], packed.bits)
    is_normalized = bool(router.norm_topk_prob) if is_rounded else True
    return classes.Mixture(classes.Router(weight, router.top_k, is_normalized, is_rounded), mixture.experts.kernel)
