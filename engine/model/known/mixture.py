"""Mixtures of experts whose routers are known, so that the C++ layers run them."""

from typing import Any, cast

from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe

from engine.model.decoder_parts import MixtureParts, linear_parts
from engine.model.known.same_code import is_like
from engine.weights.moe import PackedExperts, RouterWeight
from engine.weights.packed_weight import KernelWeight

__all__ = ["is_known_mixture", "mixture_parts", "router_weight"]

_MIXTURES = (
    modeling_mixtral.MixtralSparseMoeBlock,  # with noise, in training
    modeling_olmoe.OlmoeSparseMoeBlock,
    modeling_qwen3_moe.Qwen3MoeSparseMoeBlock,
    modeling_gpt_oss.GptOssMLP,  # whose router has another name, and which returns its scores, too
)


def is_known_mixture(module: nn.Module) -> bool:
    """Whether nothing but a known router and experts in the kernels runs when the module is called."""
    if not _is_mixture(module):
        return False
    router, experts = _router(module), module.experts
    kinds = (
        _is_normalizing_router,
        _is_rounding_router,
        _is_late_router,
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
    is_rounded = _is_rounding_router(router)
    is_normalized = bool(router.norm_topk_prob) if is_rounded else True
    weight = linear_parts(router_weight(mixture), getattr(router, "bias", None))
    is_late = _is_late_router(router)
    return MixtureParts(weight, router.top_k, is_late, is_normalized, is_rounded, mixture.experts.parts)


def _router(mixture: Any) -> Any:
    return mixture.router if hasattr(mixture, "router") else mixture.gate


def _is_mixture(module: nn.Module) -> bool:
    """Whether the module routes rows to `experts` by `gate` or `router`, and does nothing else."""
    return is_like(module, *_MIXTURES) and not module.training


def _is_normalizing_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest of all experts, by a softmax; their weights add up to one."""
    return is_like(module, modeling_mixtral.MixtralTopKRouter)


def _is_rounding_router(module: nn.Module) -> bool:
    """Whether the module does so with weights of the rows' dtype, which add up to one if `norm_topk_prob`."""
    return is_like(module, modeling_qwen3_moe.Qwen3MoeTopKRouter)


def _is_late_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest experts, whose weights are a softmax over the chosen alone."""
    return is_like(module, modeling_gpt_oss.GptOssTopKRouter)
