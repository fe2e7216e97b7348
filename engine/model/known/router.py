"""Routers of mixtures that are known, so that the C++ layers run them."""

from collections.abc import Callable
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from engine.model.decoder_parts import RouterParts
from engine.model.known.linears import is_known_linear, parts_of_linear
from engine.model.known.same_code import global_of, is_like, is_of, is_same, loaded_code
from engine.weights.linear_parts import LinearParts, linear_parts
from engine.weights.moe import RouterWeight
from engine.weights.packed_weight import KernelWeight, PackedWeight

__all__ = ["is_known_router", "is_scaling_router", "router_parts", "router_weight"]

_SIGMOID_ROUTERS = (
    *("glm4_moe.Glm4MoeTopkRouter", "dots1.Dots1TopkRouter", "solar_open.SolarOpenTopkRouter"),
    *("exaone_moe.ExaoneMoeTopkRouter", "deepseek_v3.DeepseekV3TopkRouter"),
    *("glm4_moe_lite.Glm4MoeLiteTopkRouter", "nemotron_h.NemotronHTopkRouter"),
)
_BIASED_ROUTERS = "minimax_m2.MiniMaxM2TopKRouter", "hy_v3.HYV3TopKRouter"
_LINEAR_ROUTERS = {"hunyuan_v1_moe.HunYuanMoEV1Gate": "wg", "afmoe.AfmoeTokenChoiceRouter": "gate"}
"""Routers whose weight is that of a linear layer, and its name."""
_WIDE_LATE_ROUTERS = (
    *("granitemoe.GraniteMoeTopKRouter", "granitemoeshared.GraniteMoeSharedTopKRouter"),
    *("granitemoehybrid.GraniteMoeHybridTopKRouter", "granitemoe_swa.GraniteMoeSWATopKRouter"),
)


def is_known_router(router: Any) -> bool:
    """Whether nothing but what the C++ layers do runs when the module is called."""
    if (linear := _linear_layer(router)) is not None:
        return is_known_linear(linear)
    has_weight = isinstance(router.weight, RouterWeight) and isinstance(router.weight.packed, KernelWeight)
    return has_weight and any(is_of_kind(router) for is_of_kind, _ in _KINDS)


def router_weight(router: Any) -> PackedWeight:
    """Returns the packed weight of a known router."""
    linear = _linear_layer(router)
    return cast(PackedWeight, router.weight.packed if linear is None else linear.packed)


def router_parts(router: Any, choice_bias: Tensor | None = None) -> RouterParts:
    """Returns the parts of a known router, which may be called with a bias of the choice."""
    kinds = _KINDS if _linear_layer(router) is None else _LINEAR_KINDS
    parts = next(parts_of(router) for is_of_kind, parts_of in kinds if is_of_kind(router))
    assert choice_bias is not None or not _is_biased_router(router), "such a router is called with a bias"
    return parts if choice_bias is None else msgspec.structs.replace(parts, choice_bias=choice_bias.detach().clone())


def _linear_layer(router: Any) -> Any | None:
    """Returns the linear layer of a router that has one."""
    name = next((name for kind, name in _LINEAR_ROUTERS.items() if is_of(router, kind)), None)
    return None if name is None else getattr(router, name)


def _linear(router: Any) -> LinearParts:
    return linear_parts(router.weight.packed, getattr(router, "bias", None))


def _parts_of_normalizing_router(router: Any) -> RouterParts:
    return RouterParts(_linear(router), router.top_k, is_normalized=True)


def _parts_of_rounding_router(router: Any) -> RouterParts:
    is_normalized = bool(getattr(router, "norm_topk_prob", True))
    return RouterParts(_linear(router), router.top_k, is_normalized=is_normalized, is_rounded=True)


def _parts_of_linear_router(router: Any) -> RouterParts:
    is_wide = router.wg.packed.dtype is torch.float32  # then its results are, too, whatever the type of the rows
    linear = parts_of_linear(router.wg)
    return RouterParts(linear, router.top_k, is_wide=is_wide, is_normalized=True, is_rounded=not is_wide)


def _parts_of_scaling_linear_router(router: Any) -> RouterParts:
    weighing: dict[str, Any] = {"is_normalized": True, "sum_offset": 1e-20, "factor": float(router.route_scale)}
    return RouterParts(parts_of_linear(router.gate), router.top_k, "sigmoid", **weighing)


def _parts_of_rounding_sigmoid_router(router: Any) -> RouterParts:
    weighing: dict[str, Any] = {"sum_offset": 1e-6, "factor": float(router.routed_scaling_factor)}
    is_normalized = bool(router.norm_topk_prob)
    return RouterParts(_linear(router), router.top_k, "rounded sigmoid", is_normalized=is_normalized, **weighing)


def _parts_of_late_router(router: Any) -> RouterParts:
    return RouterParts(_linear(router), router.top_k, "softmax of chosen")


def _parts_of_wide_late_router(router: Any) -> RouterParts:
    return RouterParts(_linear(router), router.top_k, "softmax of chosen", is_rounded=True)


def _parts_of_late_sigmoid_router(router: Any) -> RouterParts:
    return RouterParts(_linear(router), router.top_k, "sigmoid of chosen")


def _parts_of_choosing_router(router: Any) -> RouterParts:
    if router.expert_selection_fn != "sigmoid":
        return _parts_of_wide_late_router(router)
    return RouterParts(_linear(router), router.top_k, "sigmoid of chosen", is_normalized=bool(router.norm_topk_prob))


def _parts_of_sparse_mixer(router: Any) -> RouterParts:
    return RouterParts(_linear(router), router.top_k, "sparse mixer", margin=2 * float(router.router_jitter_noise))


def _parts_of_sigmoid_router(router: Any) -> RouterParts:
    return RouterParts(
        linear_parts(router.weight.float().packed, None),
        router.top_k,
        "sigmoid",
        is_wide=True,
        choice_bias=router.e_score_correction_bias.detach().clone(),
        num_groups=router.num_group,
        num_chosen_groups=router.topk_group,
        is_sorted=False,
        is_normalized=bool(router.norm_topk_prob),
        sum_offset=1e-20,
        factor=float(router.routed_scaling_factor),
    )


def _parts_of_biased_router(router: Any) -> RouterParts:
    is_wide = is_of(router, "hy_v3.HYV3TopKRouter")
    weight = router.weight.float() if is_wide else router.weight
    return RouterParts(
        linear_parts(weight.packed, None),
        router.top_k,
        "sigmoid",
        is_wide=is_wide,
        is_sorted=False,
        is_normalized=True,
        sum_offset=1e-20 if is_wide else 0.0,
        factor=float(getattr(router, "router_scaling_factor", 1.0)),
    )


def _parts_of_corrected_router(router: Any) -> RouterParts:
    return RouterParts(
        linear_parts(router.weight.float().packed, None),
        router.top_k,
        is_wide=True,
        choice_bias=router.moe_statics.e_score_correction_bias.detach().squeeze().clone(),
        is_normalized=True,
        least_sum=float(router.norm_min),
        is_rounded=True,
    )


def _parts_of_greedy_router(router: Any) -> RouterParts:
    linear, factor = linear_parts(router.weight.float().packed, None), float(router.routed_scaling_factor)
    return RouterParts(linear, router.top_k, is_wide=True, is_sorted=False, factor=factor)


def _is_normalizing_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest of all experts, by a softmax; their weights add up to one."""
    return is_like(module, modeling_mixtral.MixtralTopKRouter)


def _is_rounding_router(module: nn.Module) -> bool:
    """Whether the module does so with weights of the rows' dtype, which add up to one unless not `norm_topk_prob`."""
    is_normalizing = is_of(module, "qwen3_5_moe.Qwen3_5MoeTopKRouter")
    return is_normalizing or is_like(module, modeling_qwen3_moe.Qwen3MoeTopKRouter)


def _is_late_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest experts, whose weights are a softmax over the chosen alone."""
    return is_like(module, modeling_gpt_oss.GptOssTopKRouter)


def _is_wide_late_router(module: nn.Module) -> bool:
    """Whether the module does so in float32, with weights of the rows' dtype."""
    return is_of(module, *_WIDE_LATE_ROUTERS)


def _is_biased_router(module: nn.Module) -> bool:
    """Whether the module chooses by sigmoids and a bias that it is called with."""
    return is_of(module, *_BIASED_ROUTERS)


def _is_linear_router(module: nn.Module) -> bool:
    """Whether the module does as a normalizing or a rounding one, by a linear layer."""
    return is_of(module, "hunyuan_v1_moe.HunYuanMoEV1Gate")


def _is_scaling_linear_router(module: nn.Module) -> bool:
    """Whether the module chooses by sigmoids and a bias that it is called with, by a linear layer."""
    return is_of(module, "afmoe.AfmoeTokenChoiceRouter")


def _is_rounding_sigmoid_router(module: nn.Module) -> bool:
    """Whether the module chooses by sigmoids, all in the rows' dtype, and a bias that it may be called with."""
    return is_of(module, "lfm2_moe.Lfm2MoeTopKRouter")


def _is_sigmoid_router(module: nn.Module) -> bool:
    """Whether the module chooses among the best groups of experts, by sigmoids and a bias."""
    return is_of(module, *_SIGMOID_ROUTERS)


def _is_corrected_router(module: nn.Module) -> bool:
    """Whether the module chooses by a softmax and a bias, which a module of its own adds."""
    is_known = is_of(module, "ernie4_5_moe.Ernie4_5_MoeTopKRouter")
    return is_known and is_of(cast(Any, module).moe_statics, "ernie4_5_moe.Ernie4_5_MoeStatics")


def _is_greedy_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest of all experts, in float32, by a softmax that is scaled."""
    return is_of(module, "deepseek_v2.DeepseekV2TopkRouter") and cast(Any, module).topk_method == "greedy"


def _is_late_sigmoid_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest experts, whose weights are sigmoids of their logits."""
    return is_of(module, "llama4.Llama4Router")


def _is_choosing_router(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest experts, whose weights are sigmoids or a softmax of their logits, of the
    rows' type."""
    return is_of(module, "cohere2_moe.Cohere2MoeTopKRouter")


def _is_sparse_mixer(module: nn.Module) -> bool:
    """Whether the module chooses the likeliest expert, and then the next one, each weighed by a softmax over those that
    are nearly as likely."""
    is_known = is_of(module, "phimoe.PhimoeTopKRouter") and not module.training
    return is_known and is_same(global_of(type(module).forward, "sparsemixer"), loaded_code("phimoe").sparsemixer)


def is_scaling_router(module: nn.Module) -> bool:
    """Whether the module norms and scales rows, chooses the likeliest experts by a softmax, whose weights add up to
    one, and multiplies the weights of each by a number."""
    return is_of(module, "gemma4.Gemma4TextRouter")


_KINDS: tuple[tuple[Callable[[nn.Module], bool], Callable[[Any], RouterParts]], ...] = (
    (_is_normalizing_router, _parts_of_normalizing_router),
    (_is_rounding_router, _parts_of_rounding_router),
    (_is_late_router, _parts_of_late_router),
    (_is_wide_late_router, _parts_of_wide_late_router),
    (_is_late_sigmoid_router, _parts_of_late_sigmoid_router),
    (_is_choosing_router, _parts_of_choosing_router),
    (_is_sigmoid_router, _parts_of_sigmoid_router),
    (_is_biased_router, _parts_of_biased_router),
    (_is_rounding_sigmoid_router, _parts_of_rounding_sigmoid_router),
    (_is_corrected_router, _parts_of_corrected_router),
    (_is_greedy_router, _parts_of_greedy_router),
    (_is_sparse_mixer, _parts_of_sparse_mixer),
)
"""Kinds of routers with a weight of their own, and what makes their parts."""
_LINEAR_KINDS: tuple[tuple[Callable[[nn.Module], bool], Callable[[Any], RouterParts]], ...] = (
    (_is_linear_router, _parts_of_linear_router),
    (_is_scaling_linear_router, _parts_of_scaling_linear_router),
)
"""Kinds of routers whose weight is that of a linear layer, and what makes their parts."""
