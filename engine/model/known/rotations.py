"""How attentions that are known rotate their queries and keys."""

from typing import Any

from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from engine.model.fused_modules import QueryScaling, Rotation
from engine.model.known.same_code import family_of, global_of, is_of, is_same, loaded_code

__all__ = [
    "NEVER_ROTATING",
    "NORMING_LAST",
    "NOT_ALWAYS_ROTATING",
    "PARTLY_ROTATING",
    "ROTATING_BY_LAYER",
    "ROTATING_COMPLEX_NUMBERS",
    "ROTATING_IN_WINDOWS",
    "SCALING_QUERIES",
    "rotates_as_gpt_oss",
    "rotation_of",
]

SCALING_QUERIES = "ministral3.Ministral3Attention"
NEVER_ROTATING = "nemotron_h.NemotronHAttention"
NOT_ALWAYS_ROTATING = "granitemoehybrid.GraniteMoeHybridAttention"
_SCALING_NUMBERS = ("llama_4_scaling_beta", "original_max_position_embeddings")
ROTATING_IN_WINDOWS = "exaone4.Exaone4Attention", "exaone_moe.ExaoneMoeAttention"
NORMING_LAST = ("hunyuan_v1_dense.HunYuanDenseV1Attention", "hunyuan_v1_moe.HunYuanMoEV1Attention")
ROTATING_COMPLEX_NUMBERS = "llama4.Llama4TextAttention"
ROTATING_BY_LAYER = "granite_swa.GraniteSWAAttention", "granitemoe_swa.GraniteMoeSWAAttention"
_ROTATING_LOCALLY = "afmoe.AfmoeAttention"
PARTLY_ROTATING = ("phi.PhiAttention", "stablelm.StableLmAttention", "persimmon.PersimmonAttention")
_ROTATIONS = {
    "phi3": Rotation(is_partial=True),
    "olmo2": Rotation(is_wide=True),
    "olmo3": Rotation(is_wide=True),
    "olmo": Rotation(is_wide=True),
    "flex_olmo": Rotation(is_wide=True),
    "glm": Rotation(in_pairs=True, is_partial=True),
    "glm4": Rotation(in_pairs=True, is_partial=True),
    "glm4_moe": Rotation(is_partial=True),
    "minimax_m2": Rotation(is_partial=True),
    "helium": Rotation(in_pairs=True),
    "gemma4": Rotation(),
    "gemma4_unified": Rotation(),
    "nemotron": Rotation(is_partial=True),
    "gpt_neox": Rotation(is_partial=True),
    "ernie4_5": Rotation(in_pairs=True, is_wide=True),
    "ernie4_5_moe": Rotation(in_pairs=True, is_wide=True),
    "bamba": Rotation(is_partial=True),
    "qwen3_5": Rotation(is_partial=True),
    "qwen3_5_moe": Rotation(is_partial=True),
    "qwen3_next": Rotation(is_partial=True),
    "lfm3": Rotation(is_wide=True),
    "cohere": Rotation("in pairs", in_pairs=True, is_wide=True),
    "cohere2": Rotation("in pairs", in_pairs=True, is_wide=True),
    "cohere2_moe": Rotation("in pairs", in_pairs=True, is_wide=True),
}


def rotation_of(attention: nn.Module) -> Rotation | None:
    """Returns how an attention rotates, if the functions that it calls for that are known."""
    if rotates_as_gpt_oss(attention):
        return Rotation("half")
    if is_of(attention, NEVER_ROTATING):
        return Rotation(is_applied=False)
    if is_of(attention, ROTATING_COMPLEX_NUMBERS):
        return _complex_rotation_of(attention)
    rotation, family = Rotation(), family_of(attention)
    if not _rotates_as(attention, modeling_llama):
        if family not in _ROTATIONS or not _rotates_as(attention, loaded_code(family)):
            return None
        rotation = _ROTATIONS[family]
    norms_last, scaling = is_of(attention, *NORMING_LAST), _query_scaling(attention)
    is_partial = rotation.is_partial or is_of(attention, *PARTLY_ROTATING)
    return rotation._replace(
        is_partial=is_partial, is_applied=_is_rotated(attention), norms_last=norms_last, scaling=scaling
    )


def _complex_rotation_of(attention: Any) -> Rotation | None:
    family = loaded_code(family_of(attention))
    if not is_same(global_of(type(attention).forward, "apply_rotary_emb"), family.apply_rotary_emb):
        return None
    scaling, is_applied = None, bool(attention.use_rope)
    if attention.attn_temperature_tuning and not is_applied:
        numbers = float(attention.attn_scale), int(attention.floor_scale), int(attention.config.max_position_embeddings)
        scaling = QueryScaling(*numbers, shift=1, is_wide=True)
    rotation = Rotation("half", in_pairs=True, is_wide=True, norms_last=True, scaling=scaling)
    return rotation._replace(is_applied=is_applied)


def _query_scaling(attention: Any) -> QueryScaling | None:
    """Returns what an attention multiplies rotated queries by."""
    if not is_of(attention, SCALING_QUERIES):
        return None
    config = attention.config
    beta, interval = (config.rope_parameters[name] for name in _SCALING_NUMBERS)
    return QueryScaling(float(beta), int(interval), int(config.max_position_embeddings))


def _is_rotated(attention: Any) -> bool:
    """Whether the attention does rotate, where its code leaves that open."""
    if is_of(attention, NOT_ALWAYS_ROTATING):
        return bool(attention.config.position_embedding_type == "rope")
    if is_of(attention, *ROTATING_BY_LAYER):
        return bool(attention.config.layer_rope_theta[attention.layer_idx])
    if is_of(attention, _ROTATING_LOCALLY):
        return bool(attention.is_local_attention)
    if is_of(attention, "smollm3.SmolLM3Attention"):
        return bool(attention.use_rope)
    if is_of(attention, *ROTATING_IN_WINDOWS):
        return attention.sliding_window is None or bool(attention.is_sliding)
    if is_of(attention, "cohere2.Cohere2Attention", "cohere2_moe.Cohere2MoeAttention"):
        return attention.sliding_window is not None or bool(getattr(attention, "force_rope", False))
    return True


def _rotates_as(attention: nn.Module, known: Any) -> bool:
    """Whether the rotary functions that the attention calls are those of a module of transformers.

    Its code calls one by name, and that another one: each is looked up in the globals of its caller.
    """
    rotate = global_of(type(attention).forward, "apply_rotary_pos_emb")
    return is_same(rotate, known.apply_rotary_pos_emb) and is_same(global_of(rotate, "rotate_half"), known.rotate_half)


def rotates_as_gpt_oss(attention: nn.Module) -> bool:
    """Whether they are gpt-oss's, which compute the same of tables with one of two equal halves."""
    rotate = global_of(type(attention).forward, "apply_rotary_pos_emb")
    return is_same(rotate, modeling_gpt_oss.apply_rotary_pos_emb) and is_same(
        global_of(rotate, "_apply_rotary_emb"), modeling_gpt_oss._apply_rotary_emb
    )
