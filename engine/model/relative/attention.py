"""The attention of Inkling's layers, which hands on a bias of scores by distance; keys and values are convolved."""

from typing import Any, cast

from torch import Tensor, nn

from engine.attention.metadata import AttentionParams, DistanceBias, LogScaling
from engine.attention.registry import AttentionCall, attend, hides_something

__all__ = ["RelativeAttention", "RelativeProjections"]


class RelativeProjections(nn.Module):
    """What attention with biases by distance has in both generations: projections, convolutions, profiles."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.r_proj, self.o_proj = attention.r_proj, attention.o_proj
        self.k_sconv, self.v_sconv = attention.k_sconv, attention.v_sconv
        profiles = attention.rel_logits_proj.proj.detach().t().contiguous()
        self.profiles = nn.Buffer(profiles, persistent=False)  # [num_distances, num_profiles]
        self.layer_idx, self._head_dim = int(attention.layer_idx), int(attention.head_dim)
        self._params = AttentionParams(float(attention.scaling), attention.sliding_window)
        self._log_scaling = None if attention.is_sliding else _log_scaling(attention.config)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._head_dim)


class RelativeAttention(RelativeProjections):
    """Attention without rotations: what a token makes of distances is a sum of profiles that it weighs."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:  # [1, T, hidden_size]
        key = self._heads(self.k_sconv(self.k_proj(hidden_states)))
        value = self._heads(self.v_sconv(self.v_proj(hidden_states)))
        query = self._heads(self.q_proj(hidden_states))
        weights = self.r_proj(hidden_states)[0].unflatten(-1, (query.shape[2], -1))
        call = AttentionCall(
            query=self.q_norm(query)[0],
            key=self.k_norm(key)[0],
            value=value[0],
            layer=self.layer_idx,
            params=self._params,
            has_mask=hides_something(attention_mask),
            is_causal=True,
            bias=DistanceBias(weights, self.profiles, self._log_scaling),
        )
        return self.o_proj(attend(call).flatten(1)[None]), None


def _log_scaling(config: Any) -> LogScaling | None:
    first = cast(int | None, config.log_scaling_n_floor)
    return None if first is None else LogScaling(int(first), float(config.log_scaling_alpha))
