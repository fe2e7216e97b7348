"""Settings of tiny Gemma 4 models, whose layers of two kinds have heads of two sizes."""

from typing import Any

VOCAB_SIZE = 199
_WINDOW, _FULL = "sliding_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "head_dim": 16,
    "global_head_dim": 24,
    "final_logit_softcapping": 30.0,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 0,
    "layer_types": [_FULL, _WINDOW, _FULL],
}

# name -> (config class, its own settings)
GEMMA4: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4TextConfig", {**_COMMON, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_e": (  # the last two layers take the keys and values of the third and of the second
        "Gemma4TextConfig",
        {
            **_COMMON,
            **{"num_hidden_layers": 5, "layer_types": [_WINDOW, _FULL, _WINDOW, _WINDOW, _FULL]},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12},
        },
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {
            **_COMMON,
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        },
    ),
}
