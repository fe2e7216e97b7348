"""Configurations of tiny models whose heads are compared with one another, or convolved over tokens."""

from typing import Any

HEAD_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "diffllama": ("DiffLlamaConfig", {"num_key_value_heads": 2}),
    "zaya": (
        "ZayaConfig",
        {
            **{"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 12, "head_dim": 12},
            **{"cca_time0": 3, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
            "router_hidden_size": 12,
        },
    ),
}
