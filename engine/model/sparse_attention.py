"""Sparse attention over the paged cache: layers hand on what decides which positions a token attends to.

In models with DeepSeek's sparse attention each layer has an indexer, or attends to what the one before it chose; in
those with MiniMax's and Qwen 4's, indexers choose blocks of positions. An indexer whose code is known is replaced by
one that makes the same queries, keys and weights of heads, and leaves the choice to where the keys of the tokens before
are: the KV cache (`engine.attention.sparse`, `engine.attention.sparse_blocks`, `engine.attention.sparse_pools`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.metadata import BlockIndexCall, IndexCall, PoolIndexCall
from engine.attention.registry import AttentionCall
from engine.attention.sparse_pools import mean_of, weighed_by_gates
from engine.core.errors import UnsupportedModelError
from engine.model.known.same_code import class_named, global_of, is_same

__all__ = [
    "BlockIndexer",
    "Indexer",
    "LastRotatingIndexer",
    "MeanPoolIndexer",
    "ScaledIndexer",
    "check_sparse",
    "is_sparse",
    "replace_indexers",
]

_INDEXER, _LATENT_PROJECTION, _KEY_PROJECTION = "indexer", "kv_b_proj", "k_proj"
_FROM_CHOICE = "build_attention_mask_from_topk"
Rotate = Callable[..., tuple[Tensor, Tensor]]
_NO_ROTATION = torch.empty(0), torch.empty(0)


class Indexer(nn.Module):
    """Makes of a layer's input what decides to which positions its tokens attend. Positions count from the beginning of
    each sequence."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm = indexer.wq_b, indexer.wk, indexer.k_norm
        self.weights_proj = indexer.weights_proj
        self._weights_dtype: torch.dtype = indexer.weights_proj.weight.dtype
        self._norm_dtype: torch.dtype = indexer.k_norm.weight.dtype
        self._factor = indexer.softmax_scale * indexer.n_heads**-0.5
        self._layer_idx, self._num_chosen = int(indexer.layer_idx), int(indexer.index_topk)
        self._head_dim, self._num_rotated = indexer.head_dim, indexer.qk_rope_head_dim
        self._rotate = rotate

    def _queries_of(self, x: Tensor) -> Tensor:
        query: Tensor = self.wq_b(x)
        return query.view(*query.shape[:-1], -1, self._head_dim)  # [1, T, H, size]

    def _call_of(self, query: Tensor, hidden_states: Tensor, rotation: tuple[Tensor, Tensor]) -> IndexCall:
        """Returns what decides, of queries [1, T, H, size] that are not rotated yet and hidden_states [1, T, ...]."""
        key = self.k_norm(self.wk(hidden_states).to(self._norm_dtype)).to(query.dtype).unsqueeze(2)  # [1, T, 1, size]
        if self._num_rotated:
            query, key = self._rotated(query, key, rotation)
        weights = self.weights_proj(hidden_states.to(self._weights_dtype)).float() * self._factor
        return IndexCall(
            query=query[0],
            key=key[0, :, 0],
            weights=weights[0],
            layer=self._layer_idx,
            num_chosen=self._num_chosen,
        )

    def _rotated(self, query: Tensor, key: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, rest = slice(self._num_rotated), slice(self._num_rotated, None)
        rotated_query, rotated_key = self._rotate(query[..., first], key[..., first], *rotation, unsqueeze_dim=2)
        return torch.cat((rotated_query, query[..., rest]), dim=-1), torch.cat((rotated_key, key[..., rest]), dim=-1)


class LatentIndexer(Indexer):
    """An indexer whose queries are made of the latents of the layer's queries."""

    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> IndexCall:
        return self._call_of(self._queries_of(q_resid), hidden_states, position_embeddings)


class LastRotatingIndexer(LatentIndexer):
    """An indexer whose queries and keys are rotated at their end."""

    def _rotated(self, query: Tensor, key: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rest, last = slice(-self._num_rotated), slice(-self._num_rotated, None)
        rotated_query, rotated_key = self._rotate(query[..., last], key[..., last], *rotation, unsqueeze_dim=2)
        return torch.cat((query[..., rest], rotated_query), dim=-1), torch.cat((key[..., rest], rotated_key), dim=-1)


class ScaledIndexer(Indexer):
    """An indexer whose queries are made of the layer's input, and scaled by their position; some do not rotate."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        super().__init__(indexer, rotate)
        self.q_input_norm, self.softmax_scaling = indexer.q_input_norm, indexer.softmax_scaling
        if not indexer.use_rope:
            self._num_rotated = 0

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        _: Any,
        position_ids: Tensor,
        **__: Any,
    ) -> IndexCall:
        query = self._queries_of(self.q_input_norm(hidden_states))
        query = self.softmax_scaling(query, position_ids, head_dim_first=False)
        return self._call_of(query, hidden_states, position_embeddings)


class PoolIndexer(Indexer):
    """An indexer that chooses pools of positions, by keys that it weighs by gates; none rotates."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        super().__init__(indexer, rotate)
        if not indexer.index_kpool_always_select_tail:
            raise UnsupportedModelError(
                "Models whose tokens attend to whole pools of positions only (index_kpool_always_select_tail: false) "
                "cannot be served: the first tokens of a text would see nothing."
            )
        gates = indexer.index_kpool_compress_gate
        self.gate_proj = nn.Linear(gates.shape[1], gates.shape[0], bias=False, device="meta")
        self.gate_proj.weight = gates
        self.index_kpool_compress_ape = indexer.index_kpool_compress_ape
        self._num_rotated, self._pool_size = 0, int(indexer.index_kpool)

    def forward(self, hidden_states: Tensor, q_resid: Tensor, **_: Any) -> PoolIndexCall:
        own = self._call_of(self._queries_of(q_resid), hidden_states, _NO_ROTATION)
        return PoolIndexCall(
            query=own.query,
            key=torch.cat((own.key, self.gate_proj(hidden_states)[0]), dim=-1),
            weights=own.weights,
            pool_keys=self._pool_keys,
            pool_size=self._pool_size,
            layer=self._layer_idx,
            num_pools=self._num_chosen // self._pool_size,
        )

    def _pool_keys(self, kept: Tensor, _: Tensor) -> Tensor:
        return weighed_by_gates(kept, self.index_kpool_compress_ape)


class MeanPoolIndexer(nn.Module):
    """Makes of a layer's input what decides to which pools of positions its tokens attend, by keys that are means of
    those of their positions, normed and rotated as the first of them (Qwen 4)."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        super().__init__()
        self.index_qk_proj = indexer.index_qk_proj
        self.q_layernorm, self.k_layernorm = indexer.q_layernorm, indexer.k_layernorm
        self._layer_idx, self._head_dim, self._rotate = int(indexer.layer_idx), int(indexer.index_head_dim), rotate
        self._pool_size, self._num_pools = int(indexer.compress_ratio), int(indexer.block_topk)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], rotary_emb: nn.Module
    ) -> PoolIndexCall:
        """`rotary_emb` makes the rotations of other positions."""
        heads = self.index_qk_proj(hidden_states).unflatten(-1, (-1, self._head_dim))  # [1, T, heads and a key, size]
        query = self._rotated(self.q_layernorm(heads[:, :, :-1].contiguous()), position_embeddings)[0]
        return PoolIndexCall(
            query=query,
            key=heads[0, :, -1],
            weights=query.new_full(query.shape[:2], self._head_dim**-0.5, dtype=torch.float32),
            pool_keys=partial(self._pool_keys, rotary_emb),
            pool_size=self._pool_size,
            layer=self._layer_idx,
            num_pools=self._num_pools,
        )

    def _pool_keys(self, rotary_emb: nn.Module, kept: Tensor, positions: Tensor) -> Tensor:
        keys = self.k_layernorm(mean_of(kept))[None]
        return self._rotated(keys[:, :, None], rotary_emb(keys, positions[None]))[0, :, 0]

    def _rotated(self, heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:  # [1, T, heads, size]
        cos, sin = rotation
        return cast(Tensor, self._rotate(heads, cos=cos, sin=sin, unsqueeze_dim=2))


class BlockIndexer(nn.Module):
    """Makes of a layer's input what decides to which blocks of positions its tokens attend, which count from the
    beginning of each sequence."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.q_norm, self.k_norm = (
            indexer.q_proj,
            indexer.k_proj,
            indexer.q_norm,
            indexer.k_norm,
        )
        self._layer_idx, self._head_dim, self._rotate = int(indexer.layer_idx), int(indexer.head_dim), rotate
        self._block_size, self._num_blocks = int(indexer.block_size), int(indexer.topk_blocks)
        self._num_near = int(indexer.local_blocks)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> BlockIndexCall:
        query, key = (
            norm(projection(hidden_states).unflatten(-1, (-1, self._head_dim)))  # [1, T, heads, size]
            for norm, projection in ((self.q_norm, self.q_proj), (self.k_norm, self.k_proj))
        )
        rotation = (each[..., : self._head_dim] for each in position_embeddings)
        query, key = self._rotate(query, key, *rotation, unsqueeze_dim=2)
        return BlockIndexCall(
            query=query[0],
            key=key[0, :, 0],
            layer=self._layer_idx,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            num_near=self._num_near,
        )


AnyIndexer = Indexer | MeanPoolIndexer | BlockIndexer
_KNOWN: dict[str, tuple[Callable[[Any, Rotate], AnyIndexer], str]] = {
    "deepseek_v32.DeepseekV32Indexer": (LatentIndexer, "apply_rotary_pos_emb"),
    "glm_moe_dsa.GlmMoeDsaIndexer": (LatentIndexer, "apply_rotary_pos_emb_interleave"),
    "glm5_next.Glm5NextTextIndexer": (PoolIndexer, ""),
    "hy_v4.HYV4Indexer": (LastRotatingIndexer, "apply_rotary_pos_emb"),
    "minimax_m3_vl.MiniMaxM3VLIndexer": (BlockIndexer, "apply_rotary_pos_emb"),
    "mistral_large4.MistralLarge4TextIndexer": (ScaledIndexer, "apply_rotary_pos_emb_interleave"),
    "qwen4_exp.Qwen4ExpTextQSAIndexer": (MeanPoolIndexer, "apply_rotary_pos_emb"),
}
"""Indexers whose code is known, by family and class: what replaces each, and the function that rotates its queries and
keys."""


def replace_indexers(model: nn.Module) -> None:
    """Replaces the indexers of `model` in place. Raises UnsupportedModelError for those of code that is not known."""
    for attention in [each for each in model.modules() if hasattr(each, _INDEXER) and _is_attention(each)]:
        indexer = getattr(attention, _INDEXER)
        if indexer is not None:
            setattr(attention, _INDEXER, _replacement_of(indexer, type(model).__name__))
        if hasattr(attention, _LATENT_PROJECTION):
            attention.register_forward_pre_hook(_with_empty_mask, with_kwargs=True)
        if hasattr(attention, _FROM_CHOICE):
            setattr(attention, _FROM_CHOICE, _as_chosen)


def is_sparse(model: nn.Module) -> bool:
    """Whether layers of the model attend to chosen positions."""
    return any(isinstance(each, AnyIndexer) for each in model.modules())


def check_sparse(model: str, calls: Sequence[AttentionCall], device: torch.device) -> None:
    """Raises UnsupportedModelError unless the choice of positions can be made as the model is run."""
    sparse = [call for call in calls if call.sparse is not None]
    if sparse and device.type != "cpu":
        raise UnsupportedModelError(
            f"{model} has sparse attention, which is computed on the CPU only: use --device cpu."
        )
    if not all(call.is_latent for call in sparse if not isinstance(call.sparse, BlockIndexCall | PoolIndexCall)):
        raise UnsupportedModelError(
            f"{model} has sparse attention, which needs latents in the KV cache: leave out --kv-cache-dtype, and "
            "adapters of kv_b_proj."
        )
    for call in sparse:
        if isinstance(call.sparse, BlockIndexCall):
            _check_groups(model, call.sparse.query.shape[1], call.key.shape[1])


def _check_groups(model: str, num_index_heads: int, num_kv_heads: int) -> None:
    fewer, more = sorted((num_index_heads, num_kv_heads))
    if more % fewer:
        raise UnsupportedModelError(
            f"{model} has {num_index_heads} heads that choose blocks and {num_kv_heads} heads of keys, of which "
            "neither is a multiple of the other."
        )


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, _LATENT_PROJECTION) or hasattr(module, _KEY_PROJECTION)


def _replacement_of(indexer: nn.Module, name: str) -> AnyIndexer:
    written = type(indexer).forward
    for known, (kind, rotate) in _KNOWN.items():
        if is_same(written, class_named(known).forward):
            return kind(indexer, cast(Rotate, global_of(written, rotate)))
    raise UnsupportedModelError(f"{name} chooses the positions that it attends to in a way that is not known here.")


def _as_chosen(topk_indices: PoolIndexCall, **_: Any) -> PoolIndexCall:
    """Hands on what decides, in place of a mask."""
    return topk_indices


def _with_empty_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Has a layer take its slice of a mask, where it would slice none."""
    return args, {**kwargs, "attention_mask": torch.empty(1, 1, 0, 0)}
