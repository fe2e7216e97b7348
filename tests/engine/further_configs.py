"""Settings of tiny models whose parts are nearly all those of others, but for one or two."""

from typing import Any

_WINDOW, _FULL = "sliding_attention", "full_attention"
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SIGMOIDS: dict[str, Any] = {
    **{"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
}
_LONG: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0, 1.5, 2.0, 3.0]},
    **{"long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 256},
}
_GRANITE_MOE: dict[str, Any] = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.3, "attention_multiplier": 0.3},
    **{"residual_multiplier": 0.7, "logits_scaling": 3.0},
}
_BY_LAYER: dict[str, Any] = {
    **{"sliding_window": 12, "layer_types": [_FULL, _WINDOW, _WINDOW], "layer_rope_theta": [0, 10_000, 500]},
    **{"embedding_multiplier": 3.3, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0},
}

_LATENTS: dict[str, Any] = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    "num_key_value_heads": 4,
}
_GROUPS: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
}

# name -> (config class, its own settings)
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "AfmoeConfig",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 1},
            **{"num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True, "head_dim": 12},
            **{"sliding_window": 12, "layer_types": [_WINDOW, _FULL, _WINDOW]},
        },
    ),
    "granitemoe": ("GraniteMoeConfig", _GRANITE_MOE),
    "granitemoeshared": ("GraniteMoeSharedConfig", {**_GRANITE_MOE, "shared_intermediate_size": 40}),
    "granite_swa": ("GraniteSWAConfig", _BY_LAYER),
    "granitemoe_swa": ("GraniteMoeSWAConfig", {**_GRANITE_MOE, **_BY_LAYER, "shared_intermediate_size": 40}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            **{**_SIGMOIDS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
            **{"sliding_window": 12, "layer_types": [_WINDOW, _FULL, _WINDOW]},
        },
    ),
    "hy_v3": ("HYV3Config", {**_SIGMOIDS, "head_dim": 16, "router_scaling_factor": 1.5}),
    "mellum": (
        "MellumConfig",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
            **{"sliding_window": 12, "layer_types": [_WINDOW, _FULL, _WINDOW]},
            "rope_parameters": {_WINDOW: _ROPE, _FULL: {**_ROPE, "rope_theta": 500_000.0}},
        },
    ),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo": ("OlmoConfig", {}),
    "apertus": ("ApertusConfig", {}),
    "helium": ("HeliumConfig", {"head_dim": 8}),
    "youtu": ("YoutuConfig", _LATENTS),
    "deepseek_halves": (
        "DeepseekV3Config",
        {
            **{**_LATENTS, **_GROUPS, "first_k_dense_replace": 1},
            **{"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_LATENTS, **_GROUPS, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **{**_LATENTS, "qk_rope_head_dim": 32, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 24, "first_k_dense_replace": 1, "topk_method": "greedy"},
            **{"routed_scaling_factor": 1.5, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        },
    ),
    "minicpm3": ("MiniCPM3Config", {**_LATENTS, "scale_emb": 3.0, "scale_depth": 1.2, "dim_model_base": 16}),
    "llama4": (
        "Llama4TextConfig",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 40, "head_dim": 8},
            **{"no_rope_layers": [1, 0, 1], "moe_layers": [0, 1], "attention_chunk_size": 256},
        },
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "logit_scale": 0.3, "head_dim": 8},
            **{"sliding_window": 12, "layer_types": [_WINDOW, _FULL, _FULL], "prefix_dense_intermediate_size": 40},
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "cohere2_moe_sigmoid": (
        "Cohere2MoeConfig",
        {
            **{
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_shared_experts": 1,
                "rms_norm_eps": 1e-5,
                "head_dim": 8,
            },
            **{"sliding_window": 12, "layer_types": [_WINDOW, _FULL, _WINDOW], "expert_selection_fn": "sigmoid"},
            **{"shared_expert_combination_strategy": "sum", "norm_topk_prob": True},
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.2, "attention_bias": True},
            **{"lm_head_bias": True, "sliding_window": None, "max_position_embeddings": 512},
            "rope_parameters": {**_LONG, "short_mscale": 1.2, "long_mscale": 1.3, "factor": 2.0},
        },
    ),
    "phi3_long": ("Phi3Config", {"rope_parameters": _LONG, "max_position_embeddings": 512}),
    "gpt_neox_serial": ("GPTNeoXConfig", {"use_parallel_residual": False}),
    "phi": ("PhiConfig", {}),
    "phi_normed": ("PhiConfig", {"qk_layernorm": True, "hidden_act": "gelu", "intermediate_size": 64}),
    "persimmon": ("PersimmonConfig", {}),
    "stablelm_parallel": (
        "StableLmConfig",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "cohere_normed": ("CohereConfig", {"use_qk_norm": True}),
    "vaultgemma": ("VaultGemmaConfig", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12}),
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": (
        "MiniMaxConfig",
        {
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 16},
            **{"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "linear_attn_alpha_factor": 1.2},
            **{"full_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.9},
        },
    ),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"attention_window_size": 12}),
}
"""Those whose recurrent layers are replaced as a whole."""
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "BambaConfig",
        {
            **{"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 12},
            "mamba_n_groups": 2,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **{"layer_types": ["linear_attention", _FULL, "linear_attention"], "head_dim": 16},
            **{"linear_key_head_dim": 12, "linear_value_head_dim": 20},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "shared_expert_intermediate_size": 40,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **{"layer_types": ["conv", _FULL, "conv"], "num_dense_layers": 1, "num_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{"layers_block_type": ["linear_attention", "mlp", _FULL, "moe"], "num_hidden_layers": 4, "head_dim": 8},
            **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_latent_size": 16},
            **{"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5},
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2},
            **{"key_multiplier": 0.7, "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9},
            **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.7, 0.9, 0.6, 1.2, 0.8]},
            **{"mlp_multipliers": [0.8, 0.6], "embedding_multiplier": 3.3, "lm_head_multiplier": 0.4, "head_dim": 8},
        },
    ),
}
"""Those with recurrent layers, of which all are fused."""
