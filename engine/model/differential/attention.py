"""Differential attention (Ye et al., Differential Transformer, 2024): what one half of the heads attends to, less a
share of what the other half does. Both attend to the same values, those of two heads beside each other."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.metadata import AttentionParams
from engine.attention.registry import AttentionCall, attend, hides_something
from engine.mixers.sums import halved_sum
from engine.model.known.same_code import Rotate

__all__ = ["DifferentialAttention"]


class DifferentialAttention(nn.Module):
    """Attention whose keys each have the values of two heads, in one call."""

    def __init__(self, attention: Any, rotate: Rotate) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj, self._rotate = attention.o_proj, rotate
        self.share = nn.Buffer(_share_of(attention), persistent=False)
        self.layer_idx, self._head_dim = int(attention.layer_idx), int(attention.head_dim)
        self._params = AttentionParams(float(attention.scaling))
        self.factor = nn.Buffer(torch.tensor(1.0 - float(attention.lambda_init)), persistent=False)
        self._eps = float(attention.groupnorm.eps)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden_size]
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        query, key = self._heads(self.q_proj(hidden_states)), self._heads(self.k_proj(hidden_states))
        query, key = self._rotate(query, key, *position_embeddings, unsqueeze_dim=2)
        one, other = self._heads(self.v_proj(hidden_states))[0].chunk(2, dim=1)  # [T, half of the heads, size] each
        call = AttentionCall(
            query=query[0],
            key=key[0],
            value=torch.cat((one, other), dim=-1).repeat(1, 2, 1),
            layer=self.layer_idx,
            params=self._params,
            has_mask=hides_something(attention_mask),
            is_causal=True,
        )
        return self.o_proj(self._difference(attend(call)).flatten(1)[None]), None

    def _difference(self, attended: Tensor) -> Tensor:  # [T, heads, 2 * size] -> [T, half of the heads, 2 * size]
        one, other = attended.chunk(2, dim=1)
        left = (one - self.share * other).float()
        squares = halved_sum(left * left, -1) / left.shape[-1]
        return (left * torch.rsqrt(squares + self._eps)[..., None]).to(attended.dtype) * self.factor

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._head_dim)


def _share_of(attention: Any) -> Tensor:
    """Returns how much is taken away, a number of the model's type."""
    one, other = (
        torch.exp(torch.sum(query.detach() * key.detach(), dim=-1, dtype=torch.float32)).to(query.dtype)
        for query, key in (
            (attention.lambda_q1, attention.lambda_k1),
            (attention.lambda_q2, attention.lambda_k2),
        )
    )
    return cast(Tensor, one - other + attention.lambda_init)
