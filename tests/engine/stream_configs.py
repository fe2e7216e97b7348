"""Configurations of tiny models whose layers read and write several streams through gates, and read n-grams."""

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
STREAM_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen4": (
        "Qwen4ExpTextConfig",
        {
            **{"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "eos_token_id": 5},
            **{"head_dim": 16, "rope_parameters": _ROPE, "output_gate_type": "sigmoid"},
            **{"linear_key_head_dim": 12, "linear_value_head_dim": 20},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"hc_count": 3, "hc_lowrank": 20, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 20},
            **{"indexer_budget": 8, "indexer_compress_ratio": 4},
            **{"ple_layer_ids": [1, 3], "ple_embed_dim": 24, "heads_per_ngram": 2, "ple_conv_kernel_size": 3},
            **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "shared_expert_intermediate_size": 40,
        },
    ),
}
