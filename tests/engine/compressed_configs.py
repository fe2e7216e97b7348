"""Configurations of tiny models with compressed attention."""

from typing import Any

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
COMPRESSED_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
            "mlp_layer_types": ["moe", "hash_moe", "moe"],
            **{"head_dim": 16, "partial_rotary_factor": 0.5, "q_lora_rank": 16, "num_key_value_heads": 1},
            **{"o_groups": 2, "o_lora_rank": 12, "sliding_window": 7, "rope_parameters": _YARN},
            **{"index_n_heads": 16, "index_head_dim": 20, "index_topk": 3},
            **{"hc_mult": 3, "hc_sinkhorn_iters": 5, "swiglu_limit": 1.5},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
        },
    ),
}
