"""The attention of Inkling 2's layers: as Inkling's, with bounds of lengths, gates, and sinks of each token's own."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.metadata import DistanceBias
from engine.attention.registry import AttentionCall, attend, hides_something
from engine.mixers.dynamic_convolution import DynamicConvolution
from engine.mixers.registry import advance
from engine.model.relative.attention import RelativeProjections
from engine.model.relative.clip import Clip, over_root_mean_square

__all__ = ["DynamicShortConvolution", "GatedRelativeAttention"]


class DynamicShortConvolution(nn.Module):
    """Convolves keys or values with weights that are made of what they are made of."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.weight_proj = convolution.weight_proj
        weight = convolution.static_weight.detach().float().flip(0)
        self.weight = nn.Buffer(weight, persistent=False)  # [taps, channels], the newest token's last
        self._num_heads = int(convolution.num_heads)
        self._norm = math.sqrt(2 * len(weight) + 1)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:  # [1, T, channels], [1, T, hidden_size]
        wide = x[0].float()
        own = self.weight_proj(source)[0].float().unflatten(-1, (self._num_heads, -1)).flip(-1).transpose(1, 2)
        convolved = advance(DynamicConvolution(wide, own, self.weight))
        return ((convolved + wide) / self._norm).to(x.dtype)[None]


class GatedRelativeAttention(RelativeProjections):
    """Attention whose queries, keys and weights of distances have bounded lengths, and whose results are gated."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.gate_proj, self.sink_proj = attention.gate_proj, attention.sink_proj
        self.q_l2_clip, self.k_l2_clip, self.rel_l2_clip = (
            Clip(each.threshold, getattr(each, "scale", None))
            for each in (attention.q_l2_clip, attention.k_l2_clip, attention.rel_l2_clip)
        )
        self._eps = float(attention.v_norm.eps)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden_size]
        key_hidden_states: Tensor | None = None,
        value_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        of_keys = hidden_states if key_hidden_states is None else key_hidden_states
        of_values = hidden_states if value_hidden_states is None else value_hidden_states
        key = self._heads(_convolved(self.k_sconv, self.k_proj(of_keys), of_keys))
        value = self._heads(_convolved(self.v_sconv, self.v_proj(of_values), of_values))
        query = self.q_l2_clip(self._heads(self.q_proj(hidden_states)))
        weights = self.rel_l2_clip(self.r_proj(hidden_states).unflatten(-1, (query.shape[2], -1)))
        call = AttentionCall(
            query=query[0],
            key=self.k_l2_clip(key)[0],
            value=over_root_mean_square(value.float(), self._eps).to(value.dtype)[0],
            layer=self.layer_idx,
            params=self._params,
            has_mask=hides_something(attention_mask),
            is_causal=True,
            bias=DistanceBias(weights[0], self.profiles, self._log_scaling, self.sink_proj(hidden_states)[0]),
        )
        output = attend(call).flatten(1)[None]
        gates = torch.sigmoid(self.gate_proj(hidden_states).float())
        return self.o_proj((output.float() * gates).to(output.dtype)), None


def _convolved(convolution: nn.Module, x: Tensor, source: Tensor) -> Tensor:
    is_dynamic = isinstance(convolution, DynamicShortConvolution)
    result: Tensor = convolution(x, source) if is_dynamic else convolution(x)
    return result
