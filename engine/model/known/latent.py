"""Attention over latents that is known, so that the C++ layers run it: the model's own code is its plain path."""

from typing import Any, Literal

from torch import nn

from engine.attention.metadata import AttentionParams
from engine.model.decoder_parts import LatentParts, NormParts
from engine.model.fused_modules import FusedRMSNorm, Rotation
from engine.model.known.linears import is_known_linear, parts_of_linear
from engine.model.known.norms import norm_parts
from engine.model.known.same_code import family_of, global_of, is_of, is_same, loaded_code
from engine.weights.latent_heads import LatentHeads

__all__ = ["is_known_latent_attention", "latent_parts", "latent_rotation"]

_CHOOSING_PAIRS = (
    *("deepseek_v3.DeepseekV3Attention", "glm4_moe_lite.Glm4MoeLiteAttention"),
    "youtu.YoutuAttention",
)
"""Attentions that rotate pairs of neighbours if `rope_interleave`."""
_IN_HALVES = "minicpm3.MiniCPM3Attention"
_IN_COMPLEX_PAIRS = "deepseek_v2.DeepseekV2Attention"
_ROTATING = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"


def is_known_latent_attention(attention: Any) -> bool:
    """Whether nothing but what the C++ layers do runs when the module is called, which hands on latents."""
    if not is_of(attention, *_CHOOSING_PAIRS, _IN_HALVES, _IN_COMPLEX_PAIRS) or not _rotates_as_its_family(attention):
        return False
    heads = attention._modules.get("kv_b_proj")
    linears = [*_query_linears(attention), attention.kv_a_proj_with_mqa, attention.o_proj]
    norms = [attention.kv_a_layernorm, *([] if attention.q_a_proj is None else [attention.q_a_layernorm])]
    return (
        isinstance(heads, LatentHeads)
        and heads.stacks is not None
        and all(map(is_known_linear, linears))
        and all(isinstance(norm, FusedRMSNorm) for norm in norms)
    )


def latent_rotation(attention: Any) -> Rotation:
    """Returns how a known attention rotates a part of its queries and of its keys."""
    return Rotation("half", is_wide=True) if is_of(attention, _IN_COMPLEX_PAIRS) else Rotation()


def latent_parts(attention: Any, norm: NormParts | None) -> LatentParts:
    """Returns the parts of a known attention, which reads what `norm` makes."""
    *down, query = map(parts_of_linear, _query_linears(attention))
    keys, values = attention.kv_b_proj.stacks
    return LatentParts(
        norm,
        down[0] if down else None,
        norm_parts(attention.q_a_layernorm) if down else None,
        query,
        parts_of_linear(attention.kv_a_proj_with_mqa),
        norm_parts(attention.kv_a_layernorm),
        keys,
        values,
        int(attention.layer_idx),
        AttentionParams(float(attention.scaling)),
        _rotated_columns(attention),
    )


def _rotated_columns(attention: Any) -> Literal["halves", "pairs", "pairs apart"]:
    if is_of(attention, _IN_COMPLEX_PAIRS):
        return "pairs"
    in_pairs = is_of(attention, *_CHOOSING_PAIRS) and attention.config.rope_interleave
    return "pairs apart" if in_pairs else "halves"


def _query_linears(attention: Any) -> list[Any]:
    return [attention.q_proj] if attention.q_a_proj is None else [attention.q_a_proj, attention.q_b_proj]


def _rotates_as_its_family(attention: nn.Module) -> bool:
    """Whether the functions by which it may rotate are those that its family's code has under their names."""
    family = loaded_code(family_of(attention))
    written = type(attention).forward
    callers: list[tuple[object, str]] = [(written, name) for name in _ROTATING if hasattr(family, name)]
    if hasattr(family, "rotate_half"):
        callers.append((global_of(written, "apply_rotary_pos_emb"), "rotate_half"))
    return all(is_same(global_of(caller, name), getattr(family, name)) for caller, name in callers)
