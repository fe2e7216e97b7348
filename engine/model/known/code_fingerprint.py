"""Recognizes modules of transformers by the fingerprint of their code, so that fused ones can replace them.

transformers copies code from model to model: `Qwen3MLP.forward` is, instruction for instruction, `LlamaMLP.forward`.
So a model that is not known by name may consist of parts that are, and one that changes a line is not mistaken. If
transformers changes Llama itself, `engine.model.probe.check_same` detects it.
"""

from typing import Any, cast

from torch import nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from engine.attention.kv_source import Gates
from engine.model.known.kv_sources import SHARING_KEYS
from engine.model.known.rotations import (
    NEVER_ROTATING,
    NORMING_LAST,
    NOT_ALWAYS_ROTATING,
    PARTLY_ROTATING,
    ROTATING_BY_LAYER,
    ROTATING_COMPLEX_NUMBERS,
    ROTATING_IN_WINDOWS,
    SCALING_QUERIES,
    rotates_as_gpt_oss,
    rotation_of,
)
from engine.model.known.same_code import is_like, is_of, is_same, loaded_code

__all__ = [
    "SCALED_ATTENTION",
    "SCALED_MLP",
    "embedding_scale",
    "gates_of",
    "is_attention",
    "is_attention_with_norms",
    "is_complex_rotary_embedding",
    "is_embedding",
    "is_gated_mlp",
    "is_half_rotary_embedding",
    "is_layer_norm",
    "is_norm_of_each_head",
    "is_pair_rotary_embedding",
    "is_plain_layer_norm",
    "is_plain_mlp",
    "is_plain_rms_norm",
    "is_rms_norm",
    "is_rotary_embedding",
    "is_rotary_embedding_by_type",
    "is_rounding_rms_norm",
    "is_scaled_embedding",
    "is_scaling_rms_norm",
    "is_silu_mlp",
    "is_unbiased_layer_norm",
    "is_unrounded_rms_norm",
    "is_zero_centered_layer_norm",
    "is_zero_centered_rms_norm",
    "name_of_output",
    "names_of_head_norms",
    "norms_all_heads",
    "scaling_of_tables",
    "stays_wide",
]

_ATTENTIONS = (
    modeling_llama.LlamaAttention,
    modeling_qwen2.Qwen2Attention,  # with a sliding window
    modeling_mistral.MistralAttention,  # with a sliding window, configured in another way
    modeling_gemma2.Gemma2Attention,  # with a softcap
)

# What follows is named by family and class: it is known in models of that family, whose code others do not load.
SCALED_MLP, SCALED_ATTENTION = "falcon_h1.FalconH1MLP", "falcon_h1.FalconH1Attention"
"""They multiply gates and results, and keys, by numbers."""
_ATTENTIONS_WITH_DROPOUT = ("seed_oss.SeedOssAttention", "starcoder2.Starcoder2Attention")
_CLIPPING = "olmo.OlmoAttention", "olmoe.OlmoeAttention"  # if `clip_qkv`
_FURTHER_ATTENTIONS = (
    *("phi3.Phi3Attention", "smollm3.SmolLM3Attention", *_CLIPPING[:1]),
    *("cohere2.Cohere2Attention", "cohere2_moe.Cohere2MoeAttention", "ernie4_5_moe.Ernie4_5_MoeAttention"),
    *(NOT_ALWAYS_ROTATING, *ROTATING_BY_LAYER, NEVER_ROTATING, SCALED_ATTENTION),
    *(SCALING_QUERIES, "glm4_moe.Glm4MoeAttention", "nemotron.NemotronAttention", "gpt_neox.GPTNeoXAttention"),
)
_WITH_LAYER_NORMS_OF_HEADS = (
    *PARTLY_ROTATING,
    "cohere.CohereAttention",
)
"""Attentions that norm heads by layer norms if their settings say so."""
_NAMING_OUTPUT = {
    **{"lfm2.Lfm2Attention": "out_proj", "lfm2_moe.Lfm2MoeAttention": "out_proj"},
    **{"gpt_neox.GPTNeoXAttention": "dense", "phi.PhiAttention": "dense", "persimmon.PersimmonAttention": "dense"},
}
"""Attentions whose last layer is not named `o_proj`, and its name."""
_NORMING_ALL_HEADS = (
    *("olmo2.Olmo2Attention", "olmo3.Olmo3Attention", "olmoe.OlmoeAttention"),
    *("minimax_m2.MiniMaxM2Attention", "flex_olmo.FlexOlmoAttention"),
)
_GATING_OUTPUT = (
    *("qwen3_5.Qwen3_5Attention", "qwen3_5_moe.Qwen3_5MoeAttention"),
    "qwen3_next.Qwen3NextAttention",
)
_WITH_GATE_PROJECTION = ("afmoe.AfmoeAttention",)
_WITH_LAYERNORMS = ("lfm2.Lfm2Attention", "lfm2_moe.Lfm2MoeAttention")
_WIDE_ROTARY_EMBEDDINGS = (
    *("olmo2.Olmo2RotaryEmbedding", "ernie4_5.Ernie4_5RotaryEmbedding"),
    *("olmo.OlmoRotaryEmbedding", "flex_olmo.FlexOlmoRotaryEmbedding"),
    "ernie4_5_moe.Ernie4_5_MoeRotaryEmbedding",
)
_COMPLEX_ROTARY_EMBEDDINGS = "deepseek_v2.DeepseekV2RotaryEmbedding", "llama4.Llama4TextRotaryEmbedding"
_SCALING_NORMS = ("gemma4.Gemma4RMSNorm", "gemma4_unified.Gemma4UnifiedRMSNorm")
# their frequencies are the same in every batch; those of `longrope` up to the longest context: see `context_limit`
_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "ntk_alpha", "proportional", "longrope")
_SCALING_BY_LENGTH = "phimoe.PhimoeRotaryEmbedding"


def is_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm that rounds before it multiplies by its weight."""
    return is_like(module, modeling_llama.LlamaRMSNorm)


def is_unrounded_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm that rounds once, at the end."""
    further = "helium.HeliumRMSNorm", "nemotron_h.NemotronHRMSNorm"
    return is_like(module, modeling_gpt_oss.GptOssRMSNorm) or is_of(module, *further)


def is_rounding_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm that rounds before it multiplies by its weight, as Llama 4's."""
    return is_of(module, "llama4.Llama4TextRMSNorm")


def is_scaling_rms_norm(module: nn.Module) -> bool:
    """Whether the module is such a one, of a family in which some norms have no weight, and has one."""
    return is_of(module, *_SCALING_NORMS) and bool(module.with_scale)


def is_plain_rms_norm(module: nn.Module) -> bool:
    """Whether the module is such a one without a weight."""
    return is_of(module, "llama4.Llama4TextL2Norm") or (is_of(module, *_SCALING_NORMS) and not module.with_scale)


def is_zero_centered_rms_norm(module: nn.Module) -> bool:
    """Whether the module is an RMSNorm that multiplies by one more than its weight, and rounds once, at the end."""
    if is_of(module, "qwen4_exp.Qwen4ExpTextRMSNorm"):
        return module.group_size is None
    kind = modeling_gemma2.Gemma2RMSNorm
    return is_like(module, kind) and is_same(getattr(type(module), "_norm", None), kind._norm)


def is_layer_norm(module: nn.Module) -> bool:
    """Whether the module is torch's layer norm of rows, with a weight."""
    is_known = is_like(module, nn.LayerNorm)
    return is_known and len(cast(Any, module).normalized_shape) == 1 and module.weight is not None


def is_unbiased_layer_norm(module: nn.Module) -> bool:
    """Whether the module is a layer norm without a bias, of rows or with a weight for each head, in float32 and rounded
    once."""
    return is_of(module, "cohere.CohereLayerNorm", "cohere2.Cohere2LayerNorm", "cohere2_moe.Cohere2MoeLayerNorm")


def is_norm_of_each_head(module: nn.Module) -> bool:
    """Whether the module norms heads by `norms`, each by its own."""
    return is_of(module, "stablelm.StableLmLayerNormPerHead")


def is_plain_layer_norm(module: nn.Module) -> bool:
    """Whether the module is such a one without a weight, whose epsilon is 1e-5."""
    return is_of(module, "olmo.OlmoLayerNorm")


def is_zero_centered_layer_norm(module: nn.Module) -> bool:
    """Whether the module is torch's layer norm of rows, with one more than its weight."""
    is_known = is_of(module, "nemotron.NemotronLayerNorm1P")
    return is_known and len(cast(Any, module).normalized_shape) == 1 and module.bias is not None


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether the module is a gated MLP with a gate and an up projection, or one that is both."""
    if is_of(module, "seed_oss.SeedOssMLP"):  # with a dropout
        return not module.training
    further = "phi3.Phi3MLP", "glm.GlmMLP", "glm4.Glm4MLP", "llama4.Llama4TextMLP", SCALED_MLP
    in_one = (
        *("granitemoehybrid.GraniteMoeHybridMLP", "granitemoeshared.GraniteMoeSharedMLP"),
        "granitemoe_swa.GraniteMoeSWAMLP",
    )
    return is_like(module, modeling_llama.LlamaMLP) or is_of(module, *further, *in_one)


def is_silu_mlp(module: nn.Module) -> bool:
    """Whether the module is a gated MLP whose gate is a silu, and whose layers are `w1`, the gate, `w3` and `w2`."""
    return is_of(module, "lfm2.Lfm2MLP", "lfm2_moe.Lfm2MoeMLP", "lfm3.Lfm3MLP")


def is_plain_mlp(module: nn.Module) -> bool:
    """Whether the module is an MLP without a gate: a linear layer, an activation, and another one."""
    kinds = "nemotron.NemotronMLP", "arcee.ArceeMLP", "jais2.Jais2MLP", "apertus.ApertusMLP", "nemotron_h.NemotronHMLP"
    if is_of(module, *kinds, "gpt_neox.GPTNeoXMLP", "persimmon.PersimmonMLP", "phi.PhiMLP"):
        return True
    return is_of(module, "starcoder2.Starcoder2MLP") and not module.training


def is_embedding(module: nn.Module) -> bool:
    return is_like(module, nn.Embedding) and module.max_norm is None


def is_scaled_embedding(module: nn.Module) -> bool:
    """Whether the module is an embedding whose rows are multiplied by `embed_scale`."""
    is_known = is_like(module, modeling_gemma2.Gemma2TextScaledWordEmbedding)
    return is_known and type(module).__mro__[1] is nn.Embedding and module.max_norm is None


def embedding_scale(embedding: Any) -> float | None:
    """Returns what an embedding multiplies its rows by, a number of their type."""
    return embedding.embed_scale.to(embedding.weight.dtype).item() if is_scaled_embedding(embedding) else None


def is_rotary_embedding(module: nn.Module) -> bool:
    """Whether the module is a rotary embedding whose `inv_freq` never changes, in tables of two equal halves."""
    further = *_WIDE_ROTARY_EMBEDDINGS, _SCALING_BY_LENGTH
    is_known = is_like(module, modeling_llama.LlamaRotaryEmbedding) or is_of(module, *further)
    return is_known and module.rope_type in _FIXED_ROPE_TYPES


def is_pair_rotary_embedding(module: nn.Module) -> bool:
    """Whether it is such a one, with each number twice, side by side."""
    kinds = "cohere.CohereRotaryEmbedding", "cohere2.Cohere2RotaryEmbedding", "cohere2_moe.Cohere2MoeRotaryEmbedding"
    is_known = is_of(module, *kinds)
    return is_known and module.rope_type in _FIXED_ROPE_TYPES


def is_complex_rotary_embedding(module: nn.Module) -> bool:
    """Whether it is such a one, whose table is one of complex numbers in float32, one for each two columns."""
    return is_of(module, *_COMPLEX_ROTARY_EMBEDDINGS) and module.rope_type in _FIXED_ROPE_TYPES


def scaling_of_tables(rotary: Any, prefix: str) -> float:
    """Returns what a known rotary embedding multiplies its cosines and sines by, for the type of layers that `prefix`
    names."""
    if is_of(rotary, _SCALING_BY_LENGTH) and rotary.rope_type != "default":
        return float(rotary.config.rope_parameters["short_mscale"])
    return float(getattr(rotary, f"{prefix}attention_scaling"))


def stays_wide(module: nn.Module) -> bool:
    """Whether a known rotary embedding gives tables in float32."""
    return is_of(module, *_WIDE_ROTARY_EMBEDDINGS, "olmo3.Olmo3RotaryEmbedding", *_COMPLEX_ROTARY_EMBEDDINGS)


def is_half_rotary_embedding(module: nn.Module) -> bool:
    """Whether it is such a one, and returns only one of the two equal halves of its tables."""
    return is_like(module, modeling_gpt_oss.GptOssRotaryEmbedding) and module.rope_type in _FIXED_ROPE_TYPES


def is_rotary_embedding_by_type(module: nn.Module) -> bool:
    """Whether the module is a rotary embedding with frequencies for each type of layers, which never change."""
    kinds = "gemma4.Gemma4TextRotaryEmbedding", "gemma4_unified.Gemma4UnifiedTextRotaryEmbedding"
    further = "gemma3.Gemma3RotaryEmbedding", "olmo3.Olmo3RotaryEmbedding", "mellum.MellumRotaryEmbedding"
    is_known = is_of(module, *further, *kinds)
    return is_known and {*cast("dict[str, str]", module.rope_type).values()} <= {*_FIXED_ROPE_TYPES}


def is_attention(module: nn.Module) -> bool:
    """Whether the module is an attention that multiplies, rotates, attends and multiplies."""
    if is_like(module, modeling_gpt_oss.GptOssAttention):
        return rotates_as_gpt_oss(module)
    if is_of(module, *_ATTENTIONS_WITH_DROPOUT) and module.training:
        return False
    further = *_ATTENTIONS_WITH_DROPOUT, *_FURTHER_ATTENTIONS, *_WITH_LAYER_NORMS_OF_HEADS, ROTATING_COMPLEX_NUMBERS
    if not is_like(module, *_ATTENTIONS) and not is_of(module, *further):
        return False
    return not _has_norms_by_settings(module) and not _does_more(module) and rotation_of(module) is not None


def is_attention_with_norms(module: nn.Module) -> bool:
    """Whether the module is an attention that norms queries and keys, by those of `names_of_head_norms`."""
    kinds = (
        *(
            "gemma3.Gemma3Attention",
            *ROTATING_IN_WINDOWS,
            "hy_v3.HYV3Attention",
            "apertus.ApertusAttention",
            *SHARING_KEYS,
        ),
        *(*_NORMING_ALL_HEADS, *NORMING_LAST, *_GATING_OUTPUT, *_WITH_GATE_PROJECTION),
        *(*_WITH_LAYERNORMS, "lfm3.Lfm3Attention"),
    )
    by_settings = _has_norms_by_settings(module)
    is_known = is_like(module, modeling_qwen3.Qwen3Attention) or is_of(module, *kinds) or by_settings
    return is_known and not _does_more(module) and rotation_of(module) is not None


def _has_norms_by_settings(module: nn.Module) -> bool:
    is_glm_with_norms = is_of(module, "glm4_moe.Glm4MoeAttention") and bool(module.use_qk_norm)
    return is_glm_with_norms or _norms_heads_by_layer_norms(module) or norms_rotated_heads(module)


def norms_rotated_heads(module: nn.Module) -> bool:
    """Whether an attention norms what it has rotated, queries and keys by one norm without a weight."""
    return is_of(module, ROTATING_COMPLEX_NUMBERS) and hasattr(module, "qk_norm")


def _norms_heads_by_layer_norms(attention: Any) -> bool:
    if not is_of(attention, *_WITH_LAYER_NORMS_OF_HEADS):
        return False
    return bool(attention.use_qk_norm if is_of(attention, "cohere.CohereAttention") else attention.qk_layernorm)


def names_of_head_norms(attention: nn.Module) -> tuple[str, str]:
    """Returns the names of an attention's norms of queries and of keys."""
    if norms_rotated_heads(attention):
        return "qk_norm", "qk_norm"
    if is_of(attention, *_WITH_LAYERNORMS, *PARTLY_ROTATING):
        return "q_layernorm", "k_layernorm"
    return ("query_layernorm", "key_layernorm") if is_of(attention, *NORMING_LAST) else ("q_norm", "k_norm")


def name_of_output(attention: nn.Module) -> str:
    """Returns the name of an attention's last layer."""
    return next((name for kind, name in _NAMING_OUTPUT.items() if is_of(attention, kind)), "o_proj")


def _does_more(attention: Any) -> bool:
    """Whether the attention's settings have it do what fused ones do not."""
    if is_of(attention, "persimmon.PersimmonAttention"):
        family = loaded_code("persimmon")
        return not is_same(type(attention)._split_heads, family.PersimmonAttention._split_heads)
    if is_of(attention, "lfm3.Lfm3Attention"):
        return attention.g_proj is not None
    return is_of(attention, *_CLIPPING) and attention.config.clip_qkv is not None


def gates_of(attention: nn.Module) -> Gates:
    """Returns where an attention's gates come from, whose sigmoids multiply what is attended to."""
    if is_of(attention, *_GATING_OUTPUT):
        return "of queries"
    return "projected" if is_of(attention, *_WITH_GATE_PROJECTION) else "none"


def norms_all_heads(module: nn.Module) -> bool:
    """Whether an attention with norms norms all heads of a row together."""
    return is_of(module, *_NORMING_ALL_HEADS)
