"""Sparse attention over the paged cache: layers hand on what decides which positions a token attends to.

In models with DeepSeek's sparse attention each layer has an indexer, or attends to what the one before it chose. An
indexer whose code is known is replaced by one that makes the same queries, keys and weights of heads, and leaves the
choice to where the keys of the tokens before are: the KV cache (`engine.attention.sparse`).
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.metadata import IndexCall
from engine.attention.registry import AttentionCall
from engine.core.errors import UnsupportedModelError
from engine.model.known.same_code import class_named, global_of, is_same

__all__ = ["Indexer", "check_sparse", "is_sparse", "replace_indexers"]

_INDEXER = "indexer"
_ROTATIONS = {
    "deepseek_v32.DeepseekV32Indexer": "apply_rotary_pos_emb",
    "glm_moe_dsa.GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
}
"""Indexers whose code is known, by family and class, and the function that rotates their queries and keys."""

Rotate = Callable[..., tuple[Tensor, Tensor]]


class Indexer(nn.Module):
    """Makes of a layer's input what decides to which positions its tokens attend."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm = indexer.wq_b, indexer.wk, indexer.k_norm
        self.weights_proj = indexer.weights_proj
        self._weights_dtype: torch.dtype = indexer.weights_proj.weight.dtype
        self._factor = indexer.softmax_scale * indexer.n_heads**-0.5
        self._layer, self._num_chosen = int(indexer.layer_idx), int(indexer.index_topk)
        self._head_dim, self._num_rotated = indexer.head_dim, indexer.qk_rope_head_dim
        self._rotate = rotate

    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> IndexCall:
        """Positions count from the beginning of each sequence; `hidden_states` are [1, T, hidden_size]."""
        query = self.wq_b(q_resid).unflatten(-1, (-1, self._head_dim))  # [1, T, H, size]
        key = self.k_norm(self.wk(hidden_states)).unsqueeze(2)  # [1, T, 1, size]
        parts = self._num_rotated, self._head_dim - self._num_rotated
        (query_rotated, query_plain), (key_rotated, key_plain) = (each.split(parts, dim=-1) for each in (query, key))
        query_rotated, key_rotated = self._rotate(query_rotated, key_rotated, *position_embeddings, unsqueeze_dim=2)
        weights = self.weights_proj(hidden_states.to(self._weights_dtype)).float() * self._factor
        return IndexCall(
            query=torch.cat((query_rotated, query_plain), dim=-1)[0],
            key=torch.cat((key_rotated, key_plain), dim=-1)[0, :, 0],
            weights=weights[0],
            layer=self._layer,
            num_chosen=self._num_chosen,
        )


def replace_indexers(model: nn.Module) -> None:
    """Replaces the indexers of `model` in place. Raises UnsupportedModelError for those of code that is not known."""
    for attention in [each for each in model.modules() if hasattr(each, _INDEXER) and hasattr(each, "kv_b_proj")]:
        indexer = getattr(attention, _INDEXER)
        if indexer is not None:
            setattr(attention, _INDEXER, Indexer(indexer, _rotation_of(indexer, type(model).__name__)))
        attention.register_forward_pre_hook(_with_empty_mask, with_kwargs=True)


def is_sparse(model: nn.Module) -> bool:
    """Whether layers of the model attend to chosen positions."""
    return any(isinstance(each, Indexer) for each in model.modules())


def check_sparse(model: str, calls: Sequence[AttentionCall], device: torch.device) -> None:
    """Raises UnsupportedModelError unless the choice of positions can be made as the model is run."""
    sparse = [call for call in calls if call.sparse is not None]
    if sparse and device.type != "cpu":
        raise UnsupportedModelError(
            f"{model} has sparse attention, which is computed on the CPU only: use --device cpu."
        )
    if not all(call.is_latent for call in sparse):
        raise UnsupportedModelError(
            f"{model} has sparse attention, which needs latents in the KV cache: leave out --kv-cache-dtype, and "
            "adapters of kv_b_proj."
        )


def _rotation_of(indexer: nn.Module, name: str) -> Rotate:
    for known, rotate in _ROTATIONS.items():
        if is_same(type(indexer).forward, class_named(known).forward):
            return cast(Rotate, global_of(type(indexer).forward, rotate))
    raise UnsupportedModelError(f"{name} chooses the positions that it attends to in a way that is not known here.")


def _with_empty_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Has a layer take its slice of a mask, where it would slice none."""
    return args, {**kwargs, "attention_mask": torch.empty(1, 1, 0, 0)}
