"""A Llama in float64, written from its definition: what its logits are before any arithmetic rounds them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

__all__ = ["Rounding", "Weights", "logits_in_float64"]

Weights = Mapping[str, Tensor]
"""Numbers in float64 by transformers' names of the parameters."""
Rounding = Callable[[Tensor], Tensor]
"""Returns rows [T, K] as a method rounds them before it multiplies them."""


def exact(rows: Tensor) -> Tensor:
    return rows


@torch.inference_mode()
def logits_in_float64(config: Any, weights: Weights, token_ids: Tensor, rounding: Rounding = exact) -> Tensor:
    """Returns the logits [T, vocab] of a text; `rounding` is that of the inputs of the layers' matrices."""
    x = weights["model.embed_tokens.weight"][token_ids]
    for index in range(config.num_hidden_layers):
        layer = _Layer(config, weights, f"model.layers.{index}.", rounding)
        x = x + layer.attention(layer.norm(x, "input_layernorm"))
        x = x + layer.mlp(layer.norm(x, "post_attention_layernorm"))
    normed = _norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return normed @ weights["model.embed_tokens.weight"].T


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


class _Layer:
    def __init__(self, config: Any, weights: Weights, name: str, rounding: Rounding) -> None:
        self._config = config
        self._weights = weights
        self._name = name
        self._rounding = rounding

    def norm(self, x: Tensor, name: str) -> Tensor:
        return _norm(x, self._weights[f"{self._name}{name}.weight"], self._config.rms_norm_eps)

    def mlp(self, x: Tensor) -> Tensor:
        return self._linear(silu(self._linear(x, "mlp.gate_proj")) * self._linear(x, "mlp.up_proj"), "mlp.down_proj")

    def attention(self, x: Tensor) -> Tensor:
        size, num_tokens = self._config.head_dim, len(x)
        query, key, value = (
            self._linear(x, f"self_attn.{part}_proj").view(num_tokens, -1, size).transpose(0, 1) for part in "qkv"
        )
        query, key = self._rotated(query), self._rotated(key)
        key, value = (each.repeat_interleave(len(query) // len(key), dim=0) for each in (key, value))
        is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(1, 2) / size**0.5).masked_fill(is_later, float("-inf"))
        return self._linear((scores.softmax(-1) @ value).transpose(0, 1).flatten(1), "self_attn.o_proj")

    def _rotated(self, x: Tensor) -> Tensor:  # [heads, T, size]
        size = x.shape[-1]
        theta = self._config.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self._rounding(x) @ self._weights[f"{self._name}{name}.weight"].T
