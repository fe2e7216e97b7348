"""The attention of Qwen 4's layers: to pools of positions that an indexer chooses. What is attended to is gated."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.metadata import AttentionParams
from engine.attention.registry import AttentionCall, attend, hides_something
from engine.model.known.same_code import Rotate

__all__ = ["GatedSparseAttention"]


class GatedSparseAttention(nn.Module):
    """Attention whose queries come with gates, and whose indexer reads rotations of other positions, too."""

    def __init__(self, attention: Any, rotate: Rotate, rotary_emb: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self.q_norm, self.k_norm = attention.o_proj, attention.q_norm, attention.k_norm
        self.indexer, self.rotary_emb, self._rotate = attention.indexer, rotary_emb, rotate
        self.layer_idx, self._head_dim = int(attention.layer_idx), int(attention.head_dim)
        self._params = AttentionParams(float(attention.scaling))

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden_size]
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        query, gates = self._heads(self.q_proj(hidden_states), 2 * self._head_dim).chunk(2, dim=-1)
        key = self.k_norm(self._heads(self.k_proj(hidden_states), self._head_dim))
        query, key = self._rotate(self.q_norm(query.contiguous()), key, *position_embeddings, unsqueeze_dim=2)
        call = AttentionCall(
            query=query[0],
            key=key[0],
            value=self._heads(self.v_proj(hidden_states), self._head_dim)[0],
            layer=self.layer_idx,
            params=self._params,
            has_mask=hides_something(attention_mask),
            is_causal=True,
            sparse=self.indexer(hidden_states, position_embeddings, self.rotary_emb),
        )
        return self.o_proj(self._gated(attend(call).flatten(1)[None], gates.flatten(2))), None

    def _gated(self, output: Tensor, gates: Tensor) -> Tensor:
        return output * torch.sigmoid(gates)

    def _heads(self, x: Tensor, size: int) -> Tensor:
        return x.view(*x.shape[:-1], -1, size)
