"""Decoders and their heads that are known: what else they do with embeddings and logits."""

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3_moe import modeling_qwen3_moe

from engine.model.known.same_code import is_like, is_of

__all__ = [
    "caps_logits",
    "decoder_of",
    "embedding_factor",
    "final_norm",
    "hidden_divisor",
    "is_causal_lm",
    "is_decoder",
    "logits_scale",
    "path_of_layers",
    "rotary_embeddings",
]

_DECODERS = (
    modeling_llama.LlamaModel,
    modeling_qwen2.Qwen2Model,  # with masks, which are not used here
    modeling_mistral.MistralModel,
    modeling_mixtral.MixtralModel,
    modeling_qwen3_moe.Qwen3MoeModel,
    modeling_gemma2.Gemma2Model,
    modeling_gpt_oss.GptOssModel,
)
_MIXTURES_FOR_CAUSAL_LM = (
    modeling_mixtral.MixtralForCausalLM,
    modeling_qwen3_moe.Qwen3MoeForCausalLM,
    modeling_gpt_oss.GptOssForCausalLM,
)
# What follows is named by family and class: it is known in models of that family, whose code others do not load.
_FURTHER_DECODERS = (
    *("gemma.GemmaModel", "gemma3.Gemma3TextModel", "exaone4.Exaone4Model", "olmo3.Olmo3Model", "cohere2.Cohere2Model"),
    *("ministral.MinistralModel", "cwm.CwmModel", "olmoe.OlmoeModel", "qwen2_moe.Qwen2MoeModel"),
    *("glm4_moe.Glm4MoeModel", "dots1.Dots1Model", "solar_open.SolarOpenModel", "ernie4_5_moe.Ernie4_5_MoeModel"),
    *("hunyuan_v1_moe.HunYuanMoEV1Model", "nemotron.NemotronModel"),
    *("gemma4.Gemma4TextModel", "gemma4_unified.Gemma4UnifiedTextModel"),
    *("minimax_m2.MiniMaxM2Model", "exaone_moe.ExaoneMoeModel", "hy_v3.HYV3Model", "mellum.MellumModel"),
    *("flex_olmo.FlexOlmoModel", "deepseek_v3.DeepseekV3Model", "glm4_moe_lite.Glm4MoeLiteModel"),
    *("deepseek_v2.DeepseekV2Model", "stablelm.StableLmModel", "persimmon.PersimmonModel", "llama4.Llama4TextModel"),
    *("cohere2_moe.Cohere2MoeModel", "afmoe.AfmoeModel"),
)
_DROPPING = {"gpt_neox.GPTNeoXModel": "emb_dropout", "phi.PhiModel": "embed_dropout"}
"""Decoders with a dropout behind their embedding, and its name."""
_FINAL_NORMS = {
    "gpt_neox.GPTNeoXModel": "final_layer_norm",
    **{"phi.PhiModel": "final_layernorm", "persimmon.PersimmonModel": "final_layernorm"},
}
"""Decoders whose last norm is not named `norm`, and its name."""
_DIVIDING = "granite.GraniteForCausalLM", "granite_swa.GraniteSWAForCausalLM"
_DIVIDING_MIXTURES = (
    *("granitemoe.GraniteMoeForCausalLM", "granitemoeshared.GraniteMoeSharedForCausalLM"),
    "granitemoe_swa.GraniteMoeSWAForCausalLM",
)
_ROTATING_BY_LAYER = "granite_swa.GraniteSWAModel", "granitemoe_swa.GraniteMoeSWAModel"
_SCALING_EMBEDDINGS = (
    *("granite.GraniteModel", "granitemoe.GraniteMoeModel"),
    *("granitemoeshared.GraniteMoeSharedModel", *_ROTATING_BY_LAYER),
)
_FURTHER_FOR_CAUSAL_LM = (
    *("glm4_moe.Glm4MoeForCausalLM", "dots1.Dots1ForCausalLM", "solar_open.SolarOpenForCausalLM"),
    *("hunyuan_v1_moe.HunYuanMoEV1ForCausalLM", "nemotron.NemotronForCausalLM"),
    *("exaone4.Exaone4ForCausalLM", "ernie4_5.Ernie4_5ForCausalLM"),  # decorated in another order since 5.24
    *("exaone_moe.ExaoneMoeForCausalLM", "hy_v3.HYV3ForCausalLM"),
    *("deepseek_v3.DeepseekV3ForCausalLM", "glm4_moe_lite.Glm4MoeLiteForCausalLM"),
    *("deepseek_v2.DeepseekV2ForCausalLM", "gpt_neox.GPTNeoXForCausalLM", "stablelm.StableLmForCausalLM"),
    *("persimmon.PersimmonForCausalLM", "llama4.Llama4ForCausalLM", "afmoe.AfmoeForCausalLM"),
)


def decoder_of(module: PreTrainedModel) -> nn.Module:
    """Returns the decoder of a model with a head, whether or not the model's prefix is its name."""
    base = cast(nn.Module, module.base_model)
    return base if base is not module else cast(nn.Module, getattr(module, "model", base))


def path_of_layers(module: PreTrainedModel) -> str:
    """Returns the path of the layers of a model with a head in its checkpoint."""
    return f"{'model' if module.base_model is module else module.base_model_prefix}.layers"


def is_decoder(module: nn.Module) -> bool:
    """Whether the module is a decoder: an embedding, layers one after the other, a final norm."""
    if is_of(module, "starcoder2.Starcoder2Model"):  # with a dropout
        return not module.training
    if is_of(module, *_DROPPING):
        dropout: nn.Module = next(getattr(module, name) for kind, name in _DROPPING.items() if is_of(module, kind))
        return is_like(dropout, nn.Dropout) and not dropout.training
    return is_like(module, *_DECODERS) or is_of(module, *_FURTHER_DECODERS, *_SCALING_EMBEDDINGS)


def final_norm(decoder: nn.Module) -> nn.Module:
    """Returns the norm behind the layers of a known decoder."""
    name = next((name for kind, name in _FINAL_NORMS.items() if is_of(decoder, kind)), "norm")
    return cast(nn.Module, getattr(decoder, name))


def rotary_embeddings(decoder: Any) -> list[Any]:
    """Returns the rotary embedding of each layer of a known decoder, also of layers that do not rotate."""
    if not is_of(decoder, *_ROTATING_BY_LAYER):
        return [decoder.rotary_emb] * len(decoder.layers)
    by_theta = {each.config.rope_parameters["rope_theta"]: each for each in decoder.rotary_embs}
    thetas = decoder.config.layer_rope_theta[: len(decoder.layers)]
    return [by_theta[theta] if theta else decoder.rotary_emb for theta in thetas]


def embedding_factor(decoder: Any) -> float | None:
    """Returns what a known decoder multiplies by what its embedding gives."""
    if is_of(decoder, "afmoe.AfmoeModel"):
        return float(decoder.config.hidden_size**0.5) if decoder.config.mup_enabled else None
    return float(decoder.embedding_multiplier) if is_of(decoder, *_SCALING_EMBEDDINGS) else None


def is_causal_lm(module: nn.Module) -> bool:
    """Whether the module is a decoder with a language-model head, and returns nothing of its routers."""
    is_mixture = is_like(module, *_MIXTURES_FOR_CAUSAL_LM)
    return (
        is_like(module, modeling_llama.LlamaForCausalLM)
        or is_of(module, *_FURTHER_FOR_CAUSAL_LM)
        or caps_logits(module)
        or logits_scale(module) != (None, None)
        or hidden_divisor(module) is not None
        or (is_mixture and _is_silent(module))
    )


def _is_silent(module: nn.Module) -> bool:
    """Whether a mixture returns nothing of its routers."""
    return not cast(Any, module).config.output_router_logits


def logits_scale(module: nn.Module) -> tuple[float | None, float | None]:
    """Returns what a decoder with a head multiplies its logits by, and what it divides them by."""
    if is_of(module, "cohere.CohereForCausalLM", "cohere2.Cohere2ForCausalLM", "cohere2_moe.Cohere2MoeForCausalLM"):
        return float(cast(float, module.logit_scale)), None
    if is_of(module, *_DIVIDING) or (is_of(module, *_DIVIDING_MIXTURES) and _is_silent(module)):
        return None, float(cast(Any, module).config.logits_scaling)
    return None, None


def hidden_divisor(module: nn.Module) -> float | None:
    """Returns what a decoder with a head divides the head's input by."""
    is_dividing = is_of(module, "minicpm3.MiniCPM3ForCausalLM")
    return float(cast(Any, module).config.logits_scaling) if is_dividing else None


def caps_logits(module: nn.Module) -> bool:
    """Whether the module is such a one, and its logits are capped by `final_logit_softcapping` if its config has it."""
    kinds = "gemma3.Gemma3ForCausalLM", "gemma4.Gemma4ForCausalLM", "gemma4_unified.Gemma4UnifiedForCausalLM"
    return is_like(module, modeling_gemma2.Gemma2ForCausalLM) or is_of(module, *kinds)
