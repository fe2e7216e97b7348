"""Fused recurrent layers: their projections from one matmul, and few operators between it and the last one.

Each replaces the module of transformers that it is made from. The operators are those of `engine/kernels/recurrent`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.mixers.convolution import Convolution
from engine.mixers.gated_delta_rule import GatedDeltaRule
from engine.mixers.mamba2_layer import Mamba2Layer
from engine.mixers.registry import advance, advance_jointly
from engine.mixers.short_convolution import ShortConvolution
from engine.model.fused_modules import ProductFactors
from engine.weights.merged_rows import concatenated, merged_rows

__all__ = ["FusedDeltaNet", "FusedMamba2", "FusedRecurrent", "FusedShortConvolution", "names_of_projections"]


class FusedRecurrent(nn.Module):
    """A recurrent layer: a projection, what mixes tokens, and a projection of that."""

    in_proj: nn.Linear
    out_proj: nn.Linear
    factors = ProductFactors()
    factor = 1.0
    """What the first layer's rows are multiplied by."""

    def mix(self, rows: Tensor) -> Tensor:
        """Returns what the last layer multiplies, of the rows [T, columns] of the first one."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:  # [1, T, H] -> [1, T, H]
        rows = hidden_states[0] if self.factor == 1.0 else hidden_states[0] * self.factor
        return cast(Tensor, self.out_proj(self.mix(self.factors.scale_first(self.in_proj(rows))))[None])


class FusedDeltaNet(FusedRecurrent):
    """A gated delta net (Yang et al., Gated Delta Networks, 2024), as in Qwen3.5 and Qwen3-Next."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.names = names_of_projections(net)
        """The layers of the net that are one here."""
        projections = [getattr(net, name) for name in self.names]
        self.projection_sizes = [each.out_features for each in projections]
        self.num_groups, self.key_size = int(net.num_k_heads), int(net.head_k_dim)
        self.sizes = [2 * net.key_dim + net.value_dim, net.value_dim, net.num_v_heads, net.num_v_heads]
        self._order = None if len(self.names) == len(self.sizes) else _order_in_groups(net)
        self.in_proj, self.out_proj = merged_rows(projections, self.joined), net.out_proj
        self.taps = nn.Buffer(_taps_of(net.conv1d), persistent=False)
        self.decay_rates = nn.Buffer(-net.A_log.detach().float().exp(), persistent=False)
        self.time_bias = nn.Buffer(_copied(net.dt_bias), persistent=False)
        self.norm_weight = nn.Parameter(net.norm.weight.detach(), requires_grad=False)
        self.eps, self.gate = float(net.norm.variance_epsilon), str(net.norm.activation)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the rows of the projections of `names` as the merged one has them: of queries, keys and values, of
        gates, and of both numbers of each head."""
        rows = concatenated(tensors)
        return rows if self._order is None else rows[self._order]

    def mix(self, rows: Tensor) -> Tensor:
        qkv, gates, write, time_step = torch.split(rows, self.sizes, dim=1)
        mixed = advance(Convolution(qkv, self.taps, None, is_gated=True))
        numbers = self.decay_rates, self.time_bias, self.num_groups, self.key_size
        read = advance(GatedDeltaRule(mixed, write, time_step, *numbers))
        size = len(self.norm_weight)
        normed = torch.ops.twostep.rms_norm(read.view(-1, size), self.norm_weight, self.eps).view_as(read)
        torch.ops.twostep.multiply_by_gates(normed, gates, self.gate)
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


class FusedMamba2(FusedRecurrent):
    """A layer of Mamba-2 (Dao and Gu, Transformers are SSMs, 2024), as in Granite 4, or without a norm."""

    def __init__(self, layer: Any, factors: ProductFactors | None = None, factor: float = 1.0) -> None:
        super().__init__()
        self.factors, self.factor = factors or ProductFactors(), factor
        self.in_proj, self.out_proj = layer.in_proj, layer.out_proj
        self.num_groups, self.state_size = int(layer.n_groups), int(layer.ssm_state_size)
        self.limits = float(layer.time_step_limit[0]), float(layer.time_step_limit[1])
        self.taps = nn.Buffer(_taps_of(layer.conv1d), persistent=False)
        bias, dtype = layer.conv1d.bias, layer.in_proj.weight.dtype
        self.bias = None if bias is None else nn.Buffer(_copied(bias), persistent=False)
        self.decay_rates = nn.Buffer(-layer.A_log.detach().float().exp(), persistent=False)
        self.time_bias = nn.Buffer(_copied(layer.dt_bias.to(dtype)), persistent=False)
        self.skip = nn.Buffer(_copied(layer.D), persistent=False)
        has_norm = not isinstance(layer.norm, nn.Identity)
        self.norm_weight = nn.Parameter(layer.norm.weight.detach(), requires_grad=False) if has_norm else None
        self.eps = float(layer.norm.variance_epsilon) if has_norm else 0.0
        scan = self.decay_rates, self.time_bias, self.skip, *self.limits, self.num_groups
        self._numbers = self.taps, self.bias, *scan, self.norm_weight, self.eps, self.state_size

    def mix(self, rows: Tensor) -> Tensor:
        return advance_jointly(Mamba2Layer(rows, *self._numbers))


def names_of_projections(net: nn.Module) -> tuple[str, ...]:
    """Returns the names of a gated delta net's first layers."""
    if hasattr(net, "in_proj_qkvz"):
        return "in_proj_qkvz", "in_proj_ba"
    return "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"


def _order_in_groups(net: Any) -> Tensor:
    """Returns the number of each row of the merged projection among those of two projections that have, group by group,
    a query and a key, and then values and gates; and both numbers of the group's heads."""
    num_groups, num_in_group = net.num_k_heads, net.num_v_heads // net.num_k_heads
    sizes = [net.head_k_dim] * 2 + [num_in_group * net.head_v_dim] * 2
    num_rows = num_groups * sum(sizes)
    heads = torch.arange(num_rows).view(num_groups, -1)
    numbers = num_rows + torch.arange(2 * net.num_v_heads).view(num_groups, -1)
    parts = *torch.split(heads, sizes, dim=1), *torch.split(numbers, num_in_group, dim=1)
    return torch.cat([part.flatten() for part in parts])


def _taps_of(convolution: nn.Conv1d) -> Tensor:
    """Returns the weight of a depthwise convolution as [taps, channels], in float32."""
    return convolution.weight.detach()[:, 0].float().t().contiguous()


def _copied(parameter: Tensor) -> Tensor:
    """Returns the numbers in float32, and not in a mapped file, which nothing but a module's parameters may hold."""
    return parameter.detach().to(torch.float32, copy=True)
