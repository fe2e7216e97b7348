"""Lightning attention (Qin et al., Lightning Attention-2, 2024), as in MiniMax-Text-01: linear attention in which every
head's state decays by a fixed factor at each token."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.core.errors import UnsupportedModelError
from engine.mixers.linear_attention import LinearAttention
from engine.mixers.registry import advance

__all__ = ["LightningAttention"]

_ROUNDING = 2.0**-7
"""How far a head's rate may be from the formula's, relatively: checkpoints have it in bfloat16."""


class LightningAttention(nn.Module):
    """Replaces a layer whose tokens are mixed in blocks: here they are mixed one by one, from the request's state."""

    def __init__(self, layer: Any) -> None:
        """Raises UnsupportedModelError if the checkpoint's rates are not those of the formula."""
        super().__init__()
        self.qkv_proj, self.output_gate, self.out_proj = layer.qkv_proj, layer.output_gate, layer.out_proj
        self.act_fn, self.norm = layer.act_fn, layer.norm
        self.num_heads, self.head_dim = int(layer.num_attention_heads), int(layer.head_dim)
        rates = layer.get_slope_rate(layer.slope_rate.device).float()  # [H, 1, 1], not rounded to the weights' dtype
        if not torch.allclose(layer.slope_rate.float(), rates, rtol=_ROUNDING, atol=0.0):
            raise UnsupportedModelError(
                f"The states of layer {layer.layer_idx} decay at other rates (slope_rate) than config.json says."
            )
        self.decay = nn.Buffer(torch.exp(-rates[:, :, 0]), persistent=False)  # [H, 1]

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:  # [1, T, hidden_size]
        rows = hidden_states[0]
        heads = self.act_fn(self.qkv_proj(rows)).float().unflatten(-1, (self.num_heads, 3 * self.head_dim))
        query, key, value = heads.split(self.head_dim, dim=-1)  # [T, H, size] each
        decay = self.decay.float().expand(len(rows), -1, -1)
        read = advance(LinearAttention(query, key, value, decay, None)).flatten(1).to(rows.dtype)
        gated = torch.sigmoid(self.output_gate(rows)) * self.norm(read)
        return cast(Tensor, self.out_proj(gated))[None], None
