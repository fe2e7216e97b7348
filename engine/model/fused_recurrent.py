"""Fused recurrent layers: their projections from one matmul, and few operators between it and the last one.

Each replaces the module of transformers that it is made from. The operators are those of `engine/kernels/recurrent`.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.mixers.convolution import Convolution
from engine.mixers.gated_delta_rule import GatedDeltaRule
from engine.mixers.registry import advance
from engine.mixers.short_convolution import ShortConvolution
from engine.model.fused_modules import joined_rows

__all__ = ["FusedDeltaNet", "FusedRecurrent", "FusedShortConvolution"]


class FusedRecurrent(nn.Module):
    """A recurrent layer: a projection, what mixes tokens, and a projection of that."""

    in_proj: nn.Linear
    out_proj: nn.Linear

    def mix(self, rows: Tensor) -> Tensor:
        """Returns what the last layer multiplies, of the rows [T, columns] of the first one."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:  # [1, T, H] -> [1, T, H]
        return cast(Tensor, self.out_proj(self.mix(self.in_proj(hidden_states[0])))[None])


class FusedDeltaNet(FusedRecurrent):
    """A gated delta net (Yang et al., Gated Delta Networks, 2024), as in Qwen3.5."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        """The layers of the net that are one here."""
        projections = [getattr(net, name) for name in self.names]
        self.sizes = [each.out_features for each in projections]
        self.in_proj, self.out_proj = joined_rows(*projections), net.out_proj
        self.num_groups, self.key_size = int(net.num_k_heads), int(net.head_k_dim)
        self.taps = nn.Buffer(_taps_of(net.conv1d), persistent=False)
        self.decay_rates = nn.Buffer(-net.A_log.detach().float().exp(), persistent=False)
        self.time_bias = nn.Buffer(_copied(net.dt_bias), persistent=False)
        self.norm_weight = nn.Parameter(net.norm.weight.detach(), requires_grad=False)
        self.eps = float(net.norm.variance_epsilon)

    def mix(self, rows: Tensor) -> Tensor:
        qkv, gates, write, time_step = torch.split(rows, self.sizes, dim=1)
        mixed = advance(Convolution(qkv, self.taps, None, is_gated=True))
        numbers = self.decay_rates, self.time_bias, self.num_groups, self.key_size
        read = advance(GatedDeltaRule(mixed, write, time_step, *numbers))
        size = len(self.norm_weight)
        normed = torch.ops.twostep.rms_norm(read.view(-1, size), self.norm_weight, self.eps).view_as(read)
        torch.ops.twostep.multiply_by_gates(normed, gates, "silu")
        return cast(Tensor, normed)


class FusedShortConvolution(FusedRecurrent):
    """A short convolution between two gates, as in LFM2."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = layer.in_proj, layer.out_proj
        self.taps = nn.Buffer(_taps_of(layer.conv), persistent=False)
        bias = layer.conv.bias
        self.bias = None if bias is None else nn.Buffer(_copied(bias), persistent=False)

    def mix(self, rows: Tensor) -> Tensor:
        return advance(ShortConvolution(rows, self.taps, self.bias))


def _taps_of(convolution: nn.Conv1d) -> Tensor:
    """Returns the weight of a depthwise convolution as [taps, channels], in float32."""
    return convolution.weight.detach()[:, 0].float().t().contiguous()


def _copied(parameter: Tensor) -> Tensor:
    """Returns the numbers in float32, and not in a mapped file, which nothing but a module's parameters may hold."""
    return parameter.detach().to(torch.float32, copy=True)
