"""The attention of DeepSeek-V4's layers, which hands on what compressed attention over the paged cache needs."""

from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.metadata import AttentionParams, CompressedCall, IndexCall
from engine.attention.registry import AttentionCall, attend, hides_something
from engine.model.compressed.plain_norm import norm_without_weight
from engine.model.compressed.pooling import Pooling
from engine.model.compressed.rotation import rotate

__all__ = ["CompressedLayerAttention"]


class GroupedLinear(nn.Module):
    """A linear layer for each group of heads, in place of one whose weight has the rows of all."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.groups = nn.ModuleList(_linear_of(each) for each in weight.chunk(linear.n_groups))

    def forward(self, x: Tensor) -> Tensor:  # [..., groups, K] -> [..., groups * N]
        return torch.cat([linear(rows) for linear, rows in zip(self.groups, x.unbind(-2), strict=True)], dim=-1)


def _linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


class EntryIndexer(Pooling):
    """Makes what decides to which entries a token attends: queries and weights of tokens, and a key of each entry."""

    def __init__(self, indexer: Any) -> None:
        super().__init__(indexer)
        self.q_b_proj, self.scorer = indexer.q_b_proj, indexer.scorer
        self._factor = float(indexer.scorer.softmax_scale * indexer.scorer.weights_scaling)
        self._num_chosen = int(indexer.index_topk)

    def call(self, hidden_states: Tensor, latents: Tensor, rotation: tuple[Tensor, Tensor], layer: int) -> IndexCall:
        query = self.q_b_proj(latents).view(*latents.shape[:-1], -1, self.size)  # [1, T, H, size]
        return IndexCall(
            query=rotate(query, *rotation)[0],
            key=query.new_empty(0, self.size),
            weights=self.scorer.weights_proj(hidden_states).float()[0] * self._factor,
            layer=layer,
            num_chosen=self._num_chosen,
        )


class Compressor(Pooling):
    """Makes a layer's entries, and what decides among them if it has an indexer."""

    def __init__(self, compressor: Any) -> None:
        super().__init__(compressor)
        indexer = getattr(compressor, "indexer", None)
        self.indexer = None if indexer is None else EntryIndexer(indexer)

    def call(
        self, hidden_states: Tensor, latents: Tensor, rotation: tuple[Tensor, Tensor], layer: int, window: int
    ) -> CompressedCall:
        raw, index = self.raw(hidden_states), None
        if self.indexer is not None:
            raw = torch.cat((raw, self.indexer.raw(hidden_states)), dim=-1)
            index = self.indexer.call(hidden_states, latents, rotation, layer)
        return CompressedCall(raw, self._pooled, self.ratio, self.num_pooled, window, index)

    def _pooled(self, raw: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        of_entries, of_keys = raw[..., : self.raw_size], raw[..., self.raw_size :]
        return self(of_entries, positions), None if self.indexer is None else self.indexer(of_keys, positions)


class CompressedLayerAttention(nn.Module):
    """Attention to a window, and in most layers to entries, over one key that is the value, too."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_norm, self.q_b_proj = attention.q_a_proj, attention.q_a_norm, attention.q_b_proj
        self.kv_proj, self.kv_norm = attention.kv_proj, attention.kv_norm
        self.o_a_proj, self.o_b_proj = GroupedLinear(attention.o_a_proj), attention.o_b_proj
        self.sinks = attention.sinks
        self.head_norm = norm_without_weight(attention.kv_norm, attention.head_dim)
        self.compressor = None if attention.compressor is None else Compressor(attention.compressor)
        self.layer_idx, self._window = int(attention.layer_idx), int(attention.sliding_window)
        self._head_dim, self._scaling = int(attention.head_dim), float(attention.scaling)
        self._num_groups, self._rope = int(attention.config.o_groups), attention.rope_layer_type

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, hidden_size]
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        cos, sin = rotation = position_embeddings[self._rope]
        latents = self.q_a_norm(self.q_a_proj(hidden_states))
        query = self.head_norm(self._heads(self.q_b_proj(latents)))
        key = rotate(self._heads(self.kv_norm(self.kv_proj(hidden_states))), *rotation)[0]
        compressed, window = None, self._window
        if self.compressor is not None:
            compressed = self.compressor.call(hidden_states, latents, rotation, self.layer_idx, window)
        call = AttentionCall(
            query=rotate(query, *rotation)[0],
            key=key,
            value=key,
            layer=self.layer_idx,
            params=AttentionParams(self._scaling, window if compressed is None else None, None, self.sinks),
            has_mask=hides_something(attention_mask),
            is_causal=True,
            is_latent=True,
            compressed=compressed,
        )
        output = attend(call).view(1, *call.query.shape)  # rotated as its values are
        output = rotate(output, cos, -sin)
        groups = output.reshape(1, len(key), self._num_groups, -1)
        return self.o_b_proj(self.o_a_proj(groups)), None

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._head_dim)
