"""The recurrent block of Griffin (De et al., 2024), as in RecurrentGemma: a short convolution and a real-gated linear
recurrent unit (RG-LRU)."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.mixers.convolution import Convolution
from engine.mixers.real_gated_recurrence import RealGatedRecurrence
from engine.mixers.registry import advance

__all__ = ["RealGatedBlock"]

_EXPONENT = -8.0
"""Exponent of the decay, for each unit of its softplus (Griffin, equation 3)."""


class RealGatedBlock(nn.Module):
    """Replaces a block of transformers, which keeps the states of one batch in itself."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        unit, convolution = block.rg_lru, block.conv_1d
        self.linear_x, self.linear_y, self.linear_out = block.linear_x, block.linear_y, block.linear_out
        self.act_fn = block.act_fn
        self.gates = nn.ModuleList(_gates_of(unit, head) for head in range(int(unit.num_attention_heads)))
        """A layer for each head: both of its gates, one below the other."""
        self.rates = nn.Buffer(_EXPONENT * functional.softplus(unit.recurrent_param.detach().float()), persistent=False)
        taps = convolution.weight.detach()[:, 0].float().t().contiguous()
        self.taps = nn.Buffer(taps, persistent=False)  # [taps, channels]
        self.bias = nn.Buffer(convolution.bias.detach().to(torch.float32, copy=True), persistent=False)

    def forward(self, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        rows = input_states[0]  # of [1, T, hidden_size]
        beside = self.act_fn(self.linear_y(rows))
        x = advance(Convolution(self.linear_x(rows), self.taps, self.bias))
        heads = x.chunk(len(self.gates), dim=1)
        gates = torch.stack([gate(own) for gate, own in zip(self.gates, heads, strict=True)], dim=1)
        by_kind = gates.view(*gates.shape[:2], 2, -1)  # [T, H, 2, channels of a head]
        read = advance(RealGatedRecurrence(x, by_kind, self.rates, position_ids[0] == 0))
        return cast(Tensor, self.linear_out(read * beside))[None], None


def _gates_of(unit: Any, head: int) -> nn.Linear:
    weights = (unit.input_gate_weight[head], unit.recurrent_gate_weight[head])  # [inputs, outputs] each
    weight = torch.cat([each.detach().t() for each in weights])
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    biases = unit.input_gate_bias[head].detach(), unit.recurrent_gate_bias[head].detach()
    layer.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return layer
