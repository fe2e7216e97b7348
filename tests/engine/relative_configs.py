"""Configurations of tiny models whose tokens weigh a bias of their scores by distance."""

from typing import Any

_HEADS = {"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 12, "d_rel": 5}
RELATIVE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "inkling": (
        "InklingTextConfig",
        {
            **{"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], **_HEADS},
            **{"sliding_window_size": 12, "rel_extent": 20, "log_scaling_n_floor": 16, "log_scaling_alpha": 0.4},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 24, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "n_shared_experts": 2, "route_scale": 1.5, "logits_mup_width_multiplier": 3.0},
        },
    ),
    "inkling2": (
        "Inkling2TextConfig",
        {
            **{"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], **_HEADS},
            **{"sliding_window_size": 12, "rel_extent": 20, "log_scaling_n_floor": 16, "log_scaling_alpha": 0.4},
            **{"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "route_scale": 1.5},
            **{"qk_l2_clip_threshold": 2.5, "rel_l2_clip_threshold": 1.5, "n_layers_per_attn_res_block": 2},
            **{
                "mlp_gate_softcap": 0.8,
                "mlp_up_softcap": 0.7,
                "final_logit_softcapping": 5.0,
                "unpadded_vocab_size": 199,
            },
        },
    ),
}
