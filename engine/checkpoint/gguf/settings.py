"""The settings of a GGUF file's model, as transformers spells them in config.json.

What llama.cpp computes beside the metadata, as constants of an architecture, is written here as a setting.
"""

import re
from typing import Any

from engine.checkpoint.gguf.metadata import Metadata
from engine.core.errors import ModelError, UnsupportedModelError

__all__ = [
    "FACTORS",
    "LONG_FACTORS",
    "SHORT_FACTORS",
    "Settings",
    "gemma2_settings",
    "gemma3_settings",
    "gemma_settings",
    "granite_settings",
    "llama_settings",
    "llama_type",
    "phi3_settings",
    "plain_settings",
    "qwen2_moe_settings",
    "qwen3_moe_settings",
    "smollm3_settings",
    "starcoder2_settings",
    "usual_settings",
]

Settings = dict[str, Any]

FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors that are read as settings."""


def usual_settings(data: Metadata) -> Settings:
    vocab_size, hidden_size = data.sizes("token_embd.weight")
    num_heads, tensors = data.size("attention.head_count"), data.file.tensors
    num_kv_heads = data.size("attention.head_count_kv", num_heads)
    _check_even(data, num_heads, num_kv_heads)
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": data.size("feed_forward_length"),
        "num_hidden_layers": _num_layers(data),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": data.head_size,
        "max_position_embeddings": data.size("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_parameters": _rope(data),
        "sliding_window": None,
        "use_sliding_window": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _check_even(data: Metadata, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelError(f"{data.file.path}: {num_heads} heads cannot share {num_kv_heads} heads of keys and values.")


def _num_layers(data: Metadata) -> int:
    """Returns the number of layers. Raises ModelError unless there are tensors of so many, which bounds it."""
    count = data.size("block_count")
    numbers = {int(match[1]) for name in data.file.tensors if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if numbers != {*range(count)} if len(numbers) == count else True:
        raise ModelError(f"{data.file.path} is incomplete: it has tensors of {len(numbers)} of its {count} layers.")
    return count


def _rope(data: Metadata) -> Settings:
    """Returns the parameters of rotary positions. Raises UnsupportedModelError for what is not known."""
    theta, size = float(data.number("rope.freq_base", 10_000.0)), data.head_size
    if data.size("rope.dimension_count", size) != size:
        raise UnsupportedModelError(f"{data.file.path}: heads that are rotated in part cannot be served.")
    kind = data.text("rope.scaling.type", "none")
    factors = _rope_factors(data)
    if factors:
        if kind not in ("none", "longrope"):
            raise UnsupportedModelError(
                f"{data.file.path}: rope.scaling.type {kind[:64]!r} beside factors is not known."
            )
        return {"rope_type": "longrope", "rope_theta": theta, **factors}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(data.number("rope.scaling.factor"))}
    raise UnsupportedModelError(f"{data.file.path}: rope.scaling.type {kind[:64]!r} cannot be served.")


def _rope_factors(data: Metadata) -> Settings:
    """Returns the factors by which frequencies are divided, which are tensors of the file; nothing without them."""
    tensors, context = data.file.tensors, data.size("context_length")
    if FACTORS in tensors:
        numbers = _vector(data, FACTORS)
        return {
            "short_factor": numbers,
            "long_factor": numbers,
            "original_max_position_embeddings": context,
            "factor": 1.0,
        }
    if SHORT_FACTORS not in tensors or LONG_FACTORS not in tensors:
        return {}
    return {
        "short_factor": _vector(data, SHORT_FACTORS),
        "long_factor": _vector(data, LONG_FACTORS),
        "original_max_position_embeddings": data.size("rope.scaling.original_context_length", context),
        "attention_factor": float(data.number("rope.scaling.attn_factor", 1.0)),
    }


def _vector(data: Metadata, name: str) -> list[float]:
    tensor = data.file.tensors[name]
    if tensor.kind.name != "F32" or tensor.shape != (data.head_size // 2,):
        raise ModelError(f"{data.file.path}: {name} is no vector of {data.head_size // 2} numbers of 32 bits.")
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return [*memoryview(file.read(tensor.nbytes)).cast("f")]


def plain_settings(data: Metadata) -> Settings:
    return {}


def _experts(data: Metadata) -> Settings:
    num_experts, size, _ = data.sizes("blk.0.ffn_gate_exps.weight", 3)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": data.size("expert_used_count"),
        "moe_intermediate_size": size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def llama_type(data: Metadata) -> str:
    return "mixtral" if data.number("expert_count", 0) else "llama"


def llama_settings(data: Metadata) -> Settings:
    if llama_type(data) == "llama":
        data.number("expert_used_count", 0)
        return {}
    num_experts, size, _ = data.sizes("blk.0.ffn_gate_exps.weight", 3)
    chosen = data.size("expert_used_count")
    return {"num_local_experts": num_experts, "num_experts_per_tok": chosen, "intermediate_size": size}


def qwen2_moe_settings(data: Metadata) -> Settings:
    return {
        **_experts(data),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in data.file.tensors,
        "shared_expert_intermediate_size": data.sizes("blk.0.ffn_gate_shexp.weight")[0],
    }


def qwen3_moe_settings(data: Metadata) -> Settings:
    return {**_experts(data), "norm_topk_prob": True}


def gemma_settings(data: Metadata) -> Settings:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def gemma2_settings(data: Metadata) -> Settings:
    return {
        **gemma_settings(data),
        "query_pre_attn_scalar": _scaling_size(data, 46),
        "sliding_window": data.size("attention.sliding_window"),
        "layer_types": _layer_types(data, 2),
        "attn_logit_softcapping": float(data.number("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(data.number("final_logit_softcapping", 30.0)),
    }


def gemma3_settings(data: Metadata) -> Settings:
    rope = _rope(data)
    local = {"rope_type": "default", "rope_theta": float(data.number("rope.freq_base_swa", 10_000.0))}
    cap = float(data.number("final_logit_softcapping", 0.0))
    return {
        **gemma_settings(data),
        "query_pre_attn_scalar": _scaling_size(data, 62),
        "sliding_window": data.size("attention.sliding_window"),
        "layer_types": _layer_types(data, data.size("attention.sliding_window_pattern", 6)),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "final_logit_softcapping": cap or None,
    }


def _scaling_size(data: Metadata, num_layers_of_largest: int) -> float:
    """Returns the number by whose root scores are divided: that of heads, but in the largest model of the family."""
    if data.size("block_count") != num_layers_of_largest:
        return data.head_size
    return data.size("embedding_length") / data.size("attention.head_count")


def _layer_types(data: Metadata, period: int) -> list[str]:
    """Returns the kinds of layers of which each `period`-th sees everything, and the others a window."""
    kinds = ("full_attention", "sliding_attention")
    return [kinds[(layer + 1) % period != 0] for layer in range(_num_layers(data))]


def phi3_settings(data: Metadata) -> Settings:
    window = data.number("attention.sliding_window", 0)
    original = data.size("rope.scaling.original_context_length", data.size("context_length"))
    return {"sliding_window": int(window) or None, "original_max_position_embeddings": original}


def granite_settings(data: Metadata) -> Settings:
    return {
        "logits_scaling": float(data.number("logit_scale")),
        "attention_multiplier": float(data.number("attention.scale")),
        "embedding_multiplier": float(data.number("embedding_scale")),
        "residual_multiplier": float(data.number("residual_scale")),
    }


def starcoder2_settings(data: Metadata) -> Settings:
    return {
        "norm_epsilon": float(data.number("attention.layer_norm_epsilon")),
        "use_bias": "blk.0.attn_q.bias" in data.file.tensors,
        "hidden_act": "gelu_pytorch_tanh",
    }


def smollm3_settings(data: Metadata) -> Settings:
    rotated = [int((layer + 1) % 4 != 0) for layer in range(_num_layers(data))]
    return {"no_rope_layers": rotated, "no_rope_layer_interval": 4, "layer_types": None}
