"""Entries of compressed attention, pooled from raw vectors of tokens (DeepSeek-V4, 2026).

An entry is a mean of what a projection makes of its tokens, each number weighed by a softmax over these of what another
projection makes, and a bias of each place; then it is normed and rotated as its first token. Where windows overlap,
projections have a first half, for the entry behind the token's own, and a second one, for its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.mixers.sums import halved_sum
from engine.model.compressed.rotation import rotate

__all__ = ["Pooling"]


class Pooling(nn.Module):
    """Makes raw vectors of tokens, and entries of raw vectors."""

    def __init__(self, compressor: Any) -> None:
        super().__init__()
        self.kv_proj, self.gate_proj = compressor.kv_proj, compressor.gate_proj
        self.position_bias, self.kv_norm = compressor.position_bias, compressor.kv_norm
        self.rotary_emb, self._layer_type = compressor.rotary_emb, compressor.rope_layer_type
        self.ratio, self.size = int(compressor.compress_rate), int(compressor.head_dim)
        num_numbers = int(compressor.position_bias.shape[1])
        self.num_pooled = self.ratio * (num_numbers // self.size)
        """How many tokens an entry is made of."""
        self.raw_size = 2 * num_numbers

    def raw(self, hidden_states: Tensor) -> Tensor:  # [1, T, hidden_size] -> [T, raw size]
        return torch.cat((self.kv_proj(hidden_states), self.gate_proj(hidden_states)), dim=-1)[0]

    def forward(self, raw: Tensor, positions: Tensor) -> Tensor:
        """raw [N, num_pooled, raw size], and positions [N] of the first token that each entry stands for -> entries
        [N, size]."""
        values, gates = raw.float().chunk(2, dim=-1)
        gates = gates + self.position_bias.float().repeat(self.num_pooled // self.ratio, 1)
        if self.num_pooled > self.ratio:
            values, gates = self._own_halves(values), self._own_halves(gates)
            at_beginning = (positions == 0)[:, None, None]  # there is no token before them
            is_before = (torch.arange(self.num_pooled, device=raw.device) < self.ratio)[:, None]
            values = values.masked_fill(at_beginning & is_before, 0.0)
            gates = gates.masked_fill(at_beginning & is_before, -torch.inf)
        weights = torch.exp(gates - gates.amax(dim=1, keepdim=True))
        pooled = halved_sum(weights * values, 1) / halved_sum(weights, 1)
        entries = self.kv_norm(pooled.to(raw.dtype))[None]
        tables = self.rotary_emb(entries, position_ids=positions[None], layer_type=self._layer_type)
        return rotate(entries[:, :, None], *tables)[0, :, 0]

    def _own_halves(self, numbers: Tensor) -> Tensor:
        """Returns of the tokens before an entry's own the first half of their numbers, of its own ones the second."""
        return torch.cat((numbers[:, : self.ratio, : self.size], numbers[:, self.ratio :, self.size :]), dim=1)
