"""Experts beside an MLP that are known, so that the C++ layers run both as a mixture."""

from typing import Any, cast

from engine.model.decoder_parts import MixtureNormsParts, MixtureParts, NormParts, RouterParts
from engine.model.fused_layer import FusedDecoderLayer
from engine.model.fused_modules import FusedNorm, FusedRMSNorm
from engine.model.known.linears import is_known_linear, is_known_mlp, mlp_parts, parts_of_linear
from engine.model.known.norms import norm_parts
from engine.model.known.router import is_scaling_router
from engine.weights.moe import PackedExperts
from engine.weights.packed_weight import PackedWeight

__all__ = ["are_known_beside", "mixture_beside_parts", "weights_beside"]


def are_known_beside(layer: FusedDecoderLayer) -> bool:
    """Whether nothing but a known router and experts in the kernels run beside the layer's MLP."""
    if layer.form.beside is None:
        return True
    router, experts, *norms = (getattr(layer, name) for name in layer.form.beside)
    return (
        isinstance(experts, PackedExperts)
        and experts.kernel is not None
        and is_scaling_router(router)
        and isinstance(router.norm, FusedRMSNorm)
        and router.scale.dtype == router.proj.packed.dtype
        and is_known_linear(router.proj)
        and is_known_mlp(layer.ffn)
        and all(isinstance(norm, FusedNorm) for norm in norms)
    )


def weights_beside(layer: FusedDecoderLayer) -> list[PackedWeight]:
    """Returns the packed weights beside the layer's MLP that multiply every row: those of its router."""
    return [] if layer.form.beside is None else [getattr(layer, layer.form.beside.router).proj.packed]


def mixture_beside_parts(layer: FusedDecoderLayer) -> MixtureParts:
    """Returns the parts of a layer's MLP and of the known experts beside it."""
    router, experts, *norms = (getattr(layer, name) for name in cast(Any, layer.form.beside))
    chosen = RouterParts(
        parts_of_linear(router.proj),
        router.config.top_k_experts,
        is_normalized=True,
        of_experts=router.per_expert_scale.detach().float(),
    )
    read = NormParts(router.scale.detach(), router.norm.eps)  # the norm has no weight: it rounds, and then this scales
    read_by_experts, added, of_mlp = map(norm_parts, norms)
    parts_of_norms = MixtureNormsParts(read, float(router.scalar_root_size), read_by_experts, added, of_mlp)
    return MixtureParts(chosen, experts.parts, mlp_parts(cast(Any, layer.ffn)), "mlp", norms=parts_of_norms)
