"""Configurations of tiny models with sparse attention, to 8 chosen positions."""

from typing import Any

_DSA: dict[str, Any] = {
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"index_topk": 8, "index_head_dim": 20, "index_n_heads": 16},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "attention_factor": 1.0}
SPARSE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32Config", {"q_lora_rank": 16, **_DSA}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {"q_lora_rank": 16, "indexer_types": ["full", "shared", "full"], **_DSA},
    ),
    "glm5_next": (
        "Glm5NextTextConfig",
        {
            **{"layer_types": ["indexed_attention", "linear_attention", "indexed_attention"]},
            **{"indexer_types": ["full"] * 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            **{"linear_head_dim": 8, "linear_num_heads": 4, "swiglu_limit": 0.8, "q_lora_rank": 16},
            **_DSA,
            **{"qk_rope_head_dim": 0, "index_kpool": 4},
        },
    ),
    "hy_v4": (
        "HYV4Config",
        {"q_lora_rank": 16, "indexer_types": ["full", "shared", "full"], "swiglu_limit": 0.8, **_DSA},
    ),
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        {
            **{"layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"], "head_dim": 8},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "rotary_dim": 4, "swiglu_limit": 0.8},
            **{"index_block_size": 4, "index_topk_blocks": 3, "index_head_dim": 10, "index_n_heads": 2},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
            **{"dense_intermediate_size": 48, "shared_intermediate_size": 16},
        },
    ),
    "mistral_large4": (
        "MistralLarge4TextConfig",
        {
            **{"indexer_types": ["full", "full", "shared"], "no_rope_layers": [1, 0, 1], "kv_source_layers": [0, 1, 0]},
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 64},
            **_DSA,
        },
    ),
}
