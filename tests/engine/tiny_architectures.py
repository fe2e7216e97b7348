"""Tiny models of every causal architecture that transformers knows, made from its default configurations."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NUM_LAYERS = 4
NUM_HEADS = 4
_SIZES: dict[str, int] = {
    **{"dense_intermediate_size": 128, "shared_intermediate_size": 32},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), NUM_HEADS),
    "encoder_attention_heads": NUM_HEADS,
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dim_ff"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    "ffn_hidden_size": 128,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    "hidden_size_per_layer_input": 16,
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_head_dim": 16, "linear_num_heads": 4, "mamba_d_state": 16, "ssm_state_size": 16, "state_size": 16},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "qk_head_dim": 24,
    **{"sliding_window": 8, "index_topk": 8, "image_size": 28, "patch_size": 14},
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"), NUM_LAYERS),
}
_SET_WHERE_NONE = ("num_key_value_heads", "head_dim", "num_attention_heads", "num_experts_per_tok")
_CHANGES: dict[str, dict[str, Any]] = {
    **{kind: {"mamba_n_heads": 4, "mamba_d_head": 32} for kind in ("bamba", "granitemoehybrid")},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{
        kind: {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
        for kind in ("gemma3n", "gemma3n_text")
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "mistral4": {"head_dim": 16},  # half of which is rotated
    "mamba2": {"head_dim": 32, "num_heads": 4, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "head_dim": 16},
    "olmo_hybrid": {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 16},
    **{kind: {"num_experts_per_tok": 1} for kind in ("llama4", "llama4_text", "zaya")},
}
_AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_CHANGES |= {
    kind: {"rope_parameters": _AXES}
    for kind in (
        "glm46v",
        "glm4v",
        "glm_ocr",
        "qwen2_5_omni_thinker",
        "glmga",
        "hunyuan_vl",
        "paddleocr_vl",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
    )
}
_CHANGES["glm4v_moe"] = {"rope_parameters": {**_AXES, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
_CHANGES |= {
    kind: {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {index: {"head_dim": 32} for index in (1, 3)},
    }
    for kind in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
}
_CHANGES["step3p7"] = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "per_layer_config": {index: {"num_attention_heads": 2 * NUM_HEADS} for index in (1, 2)},
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
    },
    "sliding_window": 8,
    "share_expert_dim": 32,
    "swiglu_limits": [0.0, 0.0, 0.5, 0.5],
    "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.25],
}
_CHANGES["ernie4_5_vl_moe"] = {
    "moe_intermediate_size": [32, 24],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]},
}
_CHANGES["deepseek_ocr2"] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_CHANGES["glm5_next"] = {
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    **{"index_topk": 8, "index_kpool": 4, "index_n_heads": 16, "qk_rope_head_dim": 0, "head_dim": 0},
    "qk_head_dim": 16,
}
_CHANGES["inkling_mm_model"] = _CHANGES["inkling_text"] = {
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    **{"swa_head_dim": 16, "swa_num_attention_heads": NUM_HEADS, "swa_num_key_value_heads": 2},
    **{"sliding_window_size": 8, "rel_extent": 12, "log_scaling_n_floor": 16, "log_scaling_alpha": 0.5},
}
_CHANGES["inkling2"] = _CHANGES["inkling2_text"] = {
    **{name: value for name, value in _CHANGES["inkling_text"].items() if name != "mlp_layer_types"},
    **{"n_layers_per_attn_res_block": 2, "qk_l2_clip_threshold": 3.0, "rel_l2_clip_threshold": 1.5},
    **{"mlp_gate_softcap": 0.8, "mlp_up_softcap": 0.7},
}
_CHANGES["minimax_m3_vl"] = _CHANGES["minimax_m3_vl_text"] = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    **{"index_block_size": 8, "index_topk_blocks": 3, "index_head_dim": 16},
    "rotary_dim": 8,
}
_CHANGES["mistral_large4"] = {
    "no_rope_layers": [1, 0, 1, 0],
    "indexer_types": ["full", "full", "shared", "full"],
    "kv_source_layers": [0, 1, 0, 1],
    "num_key_value_heads": NUM_HEADS,
}
_CHANGES["qwen4_exp"] = _CHANGES["qwen4_exp_text"] = {
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    **{"hc_count": 3, "hc_lowrank": 24, "rope_parameters": {**_AXES, "partial_rotary_factor": 0.5}},
    **{"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    **{"ple_layer_ids": [1, 4], "ple_embed_dim": 32, "heads_per_ngram": 2, "number_of_conv_states": 3},
    **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4},
}
_CHANGES["muse_spark"] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "moe_hidden_size": 48}
_PART_CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "inkling2": {"vision_config": {"text_hidden_size": 64, "projection_hidden_dim": 64}},
    "inkling_mm_model": {
        "vision_config": {"text_hidden_size": 64, "patch_size": 4},
        "audio_config": {"text_hidden_size": 64, "n_mel_bins": 4},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "deepseek_ocr2": {
        "vision_config.sam_config": {
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "mlp_dim": 24,
            "global_attn_indexes": [],
        },
        "vision_config.encoder_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
        },
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 64}}},
}
"""What the parts of a multimodal type are to have so that they fit its small text model."""
_LATENT = {"num_key_value_heads": NUM_HEADS, "head_dim": 8}  # of one latent vector for all heads


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Returns the type's default configuration with small sizes, and with `changes` to its text part."""
    config = CONFIG_MAPPING[model_type]()
    text_config = config.get_text_config(decoder=True)
    parts = [config, text_config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    for part in {id(part): part for part in parts}.values():
        _shrink(part)
    for name, value in {**_CHANGES.get(model_type, {}), **(changes or {})}.items():
        setattr(text_config, name, value)
    for part, changes_of_part in _PART_CHANGES.get(model_type, {}).items():
        for name, value in changes_of_part.items():
            setattr(operator.attrgetter(part)(config), name, value)
    return config


def tiny_model(model_type: str, changes: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Returns a seeded random model; transformers' code raises anything where its default configuration is no model."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(model_type, changes), dtype=torch.float32)
    return model.eval()


def _shrink(config: PreTrainedConfig) -> None:
    names = {*vars(config), *getattr(config, "attribute_map", {})}
    num_layers = vars(config).get("num_hidden_layers")
    per_layer = {name: value for name, value in vars(config).items() if _is_per_layer(value, num_layers)}
    sizes = {**_SIZES, **_LATENT} if "kv_lora_rank" in names else _SIZES
    for name in names & sizes.keys():
        _set_size(config, name, sizes[name])
    for name, value in per_layer.items():
        setattr(config, name, value[:NUM_LAYERS])


def _is_per_layer(value: object, num_layers: object) -> bool:
    return isinstance(value, list) and len(value) == num_layers


def _set_size(config: PreTrainedConfig, name: str, size: int) -> None:
    """Sets the number, unless the configuration has none, or one for each layer, which it guards by an exception."""
    try:
        value = getattr(config, name)
    except Exception:
        return
    if type(value) is int or name.endswith("token_id") or (value is None and name in _SET_WHERE_NONE):
        setattr(config, name, size)
