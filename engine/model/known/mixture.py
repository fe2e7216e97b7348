"""Mixtures of experts that are known, so that the C++ layers run them."""

from typing import Any

from torch import Tensor, nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe

from engine.model.decoder_parts import MixtureParts
from engine.model.known.linears import is_known_linear, is_known_mlp, mlp_parts, parts_of_linear
from engine.model.known.router import is_known_router, router_parts, router_weight
from engine.model.known.same_code import is_like, is_of
from engine.weights.moe import PackedExperts, PackedLlama4Experts
from engine.weights.packed_weight import PackedWeight

__all__ = ["is_known_mixture", "mixture_parts", "weights_of_all_rows"]

_MIXTURES = (
    modeling_mixtral.MixtralSparseMoeBlock,  # with noise, in training
    modeling_olmoe.OlmoeSparseMoeBlock,
    modeling_qwen3_moe.Qwen3MoeSparseMoeBlock,
    modeling_gpt_oss.GptOssMLP,  # whose router has another name, and which returns its scores, too
)
_FURTHER_MIXTURES = (
    *("minimax_m2.MiniMaxM2SparseMoeBlock", "granitemoe.GraniteMoeMoE", "granitemoeshared.GraniteMoeSharedMoE"),
    *("granitemoehybrid.GraniteMoeHybridMoE", "phimoe.PhimoeSparseMoeBlock"),
    *("granitemoe_swa.GraniteMoeSWAMoE", "lfm2_moe.Lfm2MoeSparseMoeBlock"),
)
_AVERAGING = "cohere2_moe.Cohere2MoeSparseMoeBlock"  # if its strategy is `average`
_SHARING = {
    **{"qwen2_moe.Qwen2MoeSparseMoeBlock": "shared_expert", "qwen3_next.Qwen3NextSparseMoeBlock": "shared_expert"},
    "qwen3_5_moe.Qwen3_5MoeSparseMoeBlock": "shared_expert",  # as the former, weighed by `shared_expert_gate`
    "afmoe.AfmoeSparseMoeBlock": "shared_experts",
    "glm4_moe.Glm4MoeMoE": "shared_experts",
    "dots1.Dots1MoE": "shared_experts",
    "deepseek_v2.DeepseekV2Moe": "shared_experts",
    "deepseek_v3.DeepseekV3MoE": "shared_experts",
    "glm4_moe_lite.Glm4MoeLiteMoE": "shared_experts",
    "solar_open.SolarOpenMoE": "shared_experts",
    "ernie4_5_moe.Ernie4_5_MoeSparseMoeBlock": "shared_experts",  # or None
    "hunyuan_v1_moe.HunYuanMoEV1Moe": "shared_mlp",
    "llama4.Llama4TextMoe": "shared_expert",
    _AVERAGING: "shared_experts",  # or none
    "exaone_moe.ExaoneMoeSparseMoEBlock": "shared_experts",
    "hy_v3.HYV3MoE": "shared_experts",
    "nemotron_h.NemotronHMoE": "shared_experts",  # whose experts may read narrower rows
}
"""Mixtures with an MLP that all rows have, by family and class, and the MLP's name."""
_NARROWING = {"nemotron_h.NemotronHMoE": ("fc1_latent_proj", "fc2_latent_proj")}
"""Mixtures with projections around their experts, or with none, and their names."""
_BIASES = {
    **{"minimax_m2.MiniMaxM2SparseMoeBlock": "e_score_correction_bias", "hy_v3.HYV3MoE": "e_score_correction_bias"},
    **{"lfm2_moe.Lfm2MoeSparseMoeBlock": "expert_bias", "afmoe.AfmoeSparseMoeBlock": "expert_bias"},
}
"""Mixtures that call their router with a bias of the choice, if they have one, and its name."""


def is_known_mixture(module: nn.Module) -> bool:
    """Whether nothing but a known router, experts in the kernels and a known MLP runs when the module is called."""
    if module.training or not (is_like(module, *_MIXTURES) or is_of(module, *_FURTHER_MIXTURES, *_SHARING)):
        return False
    experts, shared, gate = module.experts, _shared(module), _shared_gate(module)
    return (
        _are_known_experts(experts, _router(module))
        and is_known_router(_router(module))
        and (shared is None or is_known_mlp(shared))
        and (gate is None or is_known_linear(gate))
        and all(map(is_known_linear, _narrowing(module)))
    )


def _are_known_experts(experts: Any, router: Any) -> bool:
    """Whether the experts are in the kernels: Llama 4's, which read weighed rows, are if each row is one's alone."""
    if isinstance(experts, PackedLlama4Experts):
        return experts.parts is not None and router.top_k == 1
    return isinstance(experts, PackedExperts) and experts.kernel is not None


def weights_of_all_rows(mixture: Any) -> list[PackedWeight]:
    """Returns the packed weights of a known mixture that multiply every row: of its router, and beside its experts."""
    shared, gate = _shared(mixture), _shared_gate(mixture)
    linears = [] if shared is None else [shared.gate_up_proj, shared.down_proj]
    linears += [*([] if gate is None else [gate]), *_narrowing(mixture)]
    return [router_weight(_router(mixture)), *(each.packed for each in linears)]


def mixture_parts(mixture: Any, path: str) -> MixtureParts:
    """Returns the parts of a known mixture, whose path in the checkpoint's layer is `path`."""
    shared, gate, narrowing = _shared(mixture), _shared_gate(mixture), _narrowing(mixture)
    return MixtureParts(
        router_parts(_router(mixture), _choice_bias(mixture)),
        mixture.experts.parts,
        None if shared is None else mlp_parts(shared),
        f"{path}.{_shared_name(mixture)}",
        None if gate is None else parts_of_linear(gate),
        weighs_rows=isinstance(mixture.experts, PackedLlama4Experts),
        factor=0.5 if _averages(mixture) else 1.0,
        narrowing=(parts_of_linear(narrowing[0]), parts_of_linear(narrowing[1])) if narrowing else None,
    )


def _averages(mixture: Any) -> bool:
    """Whether the mixture is the mean of what experts and the MLP beside them make."""
    return is_of(mixture, _AVERAGING) and mixture.shared_expert_combination_strategy == "average"


def _narrowing(mixture: Any) -> list[Any]:
    """Returns the projections around a mixture's experts, if there are some."""
    names = next((names for kind, names in _NARROWING.items() if is_of(mixture, kind)), ())
    return [each for each in (getattr(mixture, name) for name in names) if not is_like(each, nn.Identity)]


def _router(mixture: Any) -> Any:
    return mixture.router if hasattr(mixture, "router") else mixture.gate


def _choice_bias(mixture: Any) -> Tensor | None:
    name = next((name for kind, name in _BIASES.items() if is_of(mixture, kind)), "")
    return getattr(mixture, name, None)


def _shared(mixture: Any) -> Any | None:
    return getattr(mixture, _shared_name(mixture), None)


def _shared_name(mixture: nn.Module) -> str:
    return next((name for kind, name in _SHARING.items() if is_of(mixture, kind)), "")


def _shared_gate(mixture: nn.Module) -> Any | None:
    return getattr(mixture, "shared_expert_gate", None)
