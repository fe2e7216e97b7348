"""Decoder layers that are known: what they consist of."""

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from engine.model.fused_layer import ExpertsBeside, LayerForm, LayerInput, LayerNorms
from engine.model.known.same_code import is_like, is_of

__all__ = ["form_of_layer"]

_DECODER_LAYERS = (
    modeling_llama.LlamaDecoderLayer,
    modeling_mixtral.MixtralDecoderLayer,
    modeling_gpt_oss.GptOssDecoderLayer,
)
_WITH_DELTA_NETS = (
    *("qwen3_5.Qwen3_5DecoderLayer", "qwen3_5_moe.Qwen3_5MoeDecoderLayer"),
    "qwen3_next.Qwen3NextDecoderLayer",
)
_NORMING_AFTER = (
    *("olmo2.Olmo2DecoderLayer", "olmo3.Olmo3DecoderLayer", "exaone4.Exaone4DecoderLayer"),
    "flex_olmo.FlexOlmoDecoderLayer",
)
_NORMS_BEFORE = LayerNorms("input_layernorm", None, "post_attention_layernorm", None)
_NORMS_AROUND = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_NORMS_AROUND_AS_GLM4 = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)
_NORMS_AROUND_AS_AFMOE = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"
)
_NORMS_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_NORMS_OF_OPERATOR = LayerNorms("operator_norm", None, "ffn_norm", None)
_NORMS_BEFORE_AS_BAMBA = LayerNorms("input_layernorm", None, "pre_ff_layernorm", None)
_NORMS_AROUND_OPERATOR = LayerNorms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
_OWN_INPUT = LayerInput("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_BESIDE = ExpertsBeside(
    *("router", "experts", "pre_feedforward_layernorm_2"),
    *("post_feedforward_layernorm_2", "post_feedforward_layernorm_1"),
)
_NORMS_BEFORE_AS_VAULTGEMMA = LayerNorms("input_layernorm", None, "pre_feedforward_layernorm", None)
_NORMS_BEFORE_AS_APERTUS = LayerNorms("attention_layernorm", None, "feedforward_layernorm", None)
_ONE_NORM = LayerNorms("input_layernorm", None, "input_layernorm", None)


def form_of_layer(module: nn.Module) -> LayerForm | None:
    """Returns what the module consists of if it is a known decoder layer."""
    if is_like(module, *_DECODER_LAYERS) or is_of(module, "nemotron.NemotronDecoderLayer"):
        return LayerForm(_NORMS_BEFORE)
    if is_of(module, "phi3.Phi3DecoderLayer"):  # with dropouts
        is_idle = _are_idle(cast(Any, module).resid_attn_dropout, cast(Any, module).resid_mlp_dropout)
        return LayerForm(_NORMS_BEFORE) if is_idle else None
    if is_like(module, modeling_gemma2.Gemma2DecoderLayer) or is_of(module, "gemma3.Gemma3DecoderLayer"):
        return LayerForm(_NORMS_AROUND)
    if is_of(module, "glm4.Glm4DecoderLayer"):
        return LayerForm(_NORMS_AROUND_AS_GLM4)
    if is_of(module, *_NORMING_AFTER):
        return LayerForm(_NORMS_AFTER)
    if is_of(module, "granite.GraniteDecoderLayer", "granite_swa.GraniteSWADecoderLayer"):
        return LayerForm(_NORMS_BEFORE, float(cast(float, module.residual_multiplier)))
    if is_of(module, *_WITH_DELTA_NETS):
        is_recurrent = cast(Any, module).block_type == "linear_attention"
        return LayerForm(_NORMS_BEFORE, mixer="linear_attn" if is_recurrent else "self_attn")
    if is_of(module, "cohere.CohereDecoderLayer", "cohere2.Cohere2DecoderLayer", "cohere2_moe.Cohere2MoeDecoderLayer"):
        return LayerForm(_ONE_NORM, is_parallel=True)
    form_of = next((form_of for kind, form_of in _VARYING.items() if is_of(module, kind)), None)
    return form_of(module) if form_of else None


def _are_idle(*dropouts: nn.Module) -> bool:
    return all(is_like(each, nn.Dropout) and not each.training for each in dropouts)


def _form_of_gpt_neox(layer: Any) -> LayerForm | None:
    if not _are_idle(layer.post_attention_dropout, layer.post_mlp_dropout):
        return None
    is_parallel = bool(layer.use_parallel_residual)
    return LayerForm(_NORMS_BEFORE, is_parallel=is_parallel, adds_first=is_parallel, mixer="attention")


def _form_of_phi(layer: Any) -> LayerForm | None:
    return LayerForm(_ONE_NORM, is_parallel=True, adds_first=True) if _are_idle(layer.resid_dropout) else None


def _form_of_stablelm(layer: Any) -> LayerForm | None:
    is_parallel = bool(getattr(layer, "use_parallel_residual", False))  # Persimmon's are never
    names = _ONE_NORM if is_parallel else _NORMS_BEFORE
    return LayerForm(names, is_parallel=is_parallel) if _are_idle(layer.dropout) else None


def _form_of_gemma4(layer: Any) -> LayerForm:
    beside = _BESIDE if getattr(layer, "enable_moe_block", False) else None
    own = _OWN_INPUT if getattr(layer, "hidden_size_per_layer_input", 0) else None
    return LayerForm(_NORMS_AROUND, beside=beside, input=own, factor=float(layer.layer_scalar))


def _form_beside_shared_mlp(layer: Any) -> LayerForm:
    ffn, shared = ("block_sparse_moe", "shared_mlp") if layer.has_experts else ("shared_mlp", None)
    mixer = "self_attn" if layer.mamba is None else "mamba"
    return LayerForm(_NORMS_BEFORE, float(layer.residual_multiplier), mixer=mixer, ffn=ffn, shared=shared)


def _form_with_mixture(layer: Any) -> LayerForm:
    shared = None if getattr(layer, "shared_mlp", None) is None else "shared_mlp"
    return LayerForm(_NORMS_BEFORE, float(layer.residual_multiplier), ffn="block_sparse_moe", shared=shared)


def _form_around_operator(layer: Any) -> LayerForm:
    has_norms_after = type(getattr(layer, "post_operator_norm", nn.Identity())) is not nn.Identity
    names = _NORMS_AROUND_OPERATOR if has_norms_after else _NORMS_OF_OPERATOR
    return LayerForm(names, mixer="self_attn" if layer.is_attention_layer else "conv", ffn="feed_forward")


def _form_of_bamba(layer: Any) -> LayerForm:
    mixer = "mamba" if layer.block_type == "linear_attention" else "self_attn"
    return LayerForm(_NORMS_BEFORE_AS_BAMBA, mixer=mixer, ffn="feed_forward", returns_pair=True)


_VARYING: dict[str, Callable[[Any], LayerForm | None]] = {
    "afmoe.AfmoeDecoderLayer": lambda _: LayerForm(_NORMS_AROUND_AS_AFMOE),
    "llama4.Llama4TextDecoderLayer": lambda _: LayerForm(_NORMS_BEFORE, ffn="feed_forward"),
    "gpt_neox.GPTNeoXLayer": _form_of_gpt_neox,
    "phi.PhiDecoderLayer": _form_of_phi,
    "stablelm.StableLmDecoderLayer": _form_of_stablelm,
    "persimmon.PersimmonDecoderLayer": _form_of_stablelm,
    "apertus.ApertusDecoderLayer": lambda _: LayerForm(_NORMS_BEFORE_AS_APERTUS),
    "minicpm3.MiniCPM3DecoderLayer": lambda layer: LayerForm(_NORMS_BEFORE, float(layer.residual_scale)),
    "vaultgemma.VaultGemmaDecoderLayer": lambda _: LayerForm(_NORMS_BEFORE_AS_VAULTGEMMA),
    "gemma4.Gemma4TextDecoderLayer": _form_of_gemma4,
    "gemma4_unified.Gemma4UnifiedTextDecoderLayer": _form_of_gemma4,
    "granitemoe.GraniteMoeDecoderLayer": _form_with_mixture,
    "granitemoeshared.GraniteMoeSharedDecoderLayer": _form_with_mixture,
    "granitemoe_swa.GraniteMoeSWADecoderLayer": _form_with_mixture,
    "granitemoehybrid.GraniteMoeHybridDecoderLayer": _form_beside_shared_mlp,
    "bamba.BambaDecoderLayer": _form_of_bamba,
    "lfm2.Lfm2DecoderLayer": _form_around_operator,
    "lfm2_moe.Lfm2MoeDecoderLayer": _form_around_operator,
    "lfm3.Lfm3DecoderLayer": _form_around_operator,
}
"""Layers whose norms have names of their own, or that differ by their settings, or by their place in the model."""
