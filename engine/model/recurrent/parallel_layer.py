"""Layers that mix tokens recurrently beside their attention, as in Falcon-H1."""

from typing import Any

from torch import Tensor, nn

from engine.model.fused_modules import FusedAttention, FusedMLP, FusedNorm
from engine.model.fused_recurrent import FusedMamba2
from engine.model.known.same_code import is_of

__all__ = ["FusedParallelLayer", "fused_parallel_layer"]


class FusedParallelLayer(nn.Module):
    """A decoder layer whose attention and Mamba-2 read one norm; the sum of both, and then an MLP's result, are added
    to the residual. Its children have the names that they have in the checkpoint."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.pre_ff_layernorm = layer.input_layernorm, layer.pre_ff_layernorm
        self.mamba, self.self_attn, self.feed_forward = layer.mamba, layer.self_attn, layer.feed_forward
        self.attention_factor = float(layer.attention_in_multiplier)
        """What rows are multiplied by before the attention reads them."""
        self.attended_factor, self.mixed_factor = float(layer.attn_out_multiplier), float(layer.ssm_out_multiplier)
        """What the results of both are multiplied by."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:  # [1, T, H] -> [1, T, H]
        read = self.input_layernorm(hidden_states)
        mixed = self.mamba(hidden_states=read) * self.mixed_factor
        attended = self.self_attn(hidden_states=read * self.attention_factor, **kwargs)[0] * self.attended_factor
        residual, normed = self.pre_ff_layernorm.add_and_norm(hidden_states, mixed + attended)
        return (residual + self.feed_forward(normed),)


def fused_parallel_layer(layer: nn.Module) -> FusedParallelLayer | None:
    """Returns the layer in this form if it is a known one, all of whose parts are fused."""
    if not is_of(layer, "falcon_h1.FalconH1DecoderLayer"):
        return None
    parts: Any = layer
    are_normed = isinstance(parts.input_layernorm, FusedNorm) and isinstance(parts.pre_ff_layernorm, FusedNorm)
    are_mixed = isinstance(parts.mamba, FusedMamba2) and isinstance(parts.self_attn, FusedAttention)
    return FusedParallelLayer(layer) if are_normed and are_mixed and isinstance(parts.feed_forward, FusedMLP) else None
