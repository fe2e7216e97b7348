"""The one attention function registered with transformers: it hands each layer's query, key and value to a handler.

The handler is found through a context variable, because some models do not pass extra arguments down to their layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from engine.attention.metadata import (
    AnyIndexCall,
    AttentionParams,
    BlockIndexCall,
    CompressedCall,
    DistanceBias,
    IndexCall,
    PoolIndexCall,
)
from engine.weights.latent_heads import LatentHeads

ATTENTION_NAME = "twostep"


class AttentionCall(NamedTuple):
    """One layer's attention call. `query` is [num_tokens, num_heads, head_size]; `key` and `value` have num_kv_heads.

    It is a tuple because one is made for every layer of every step.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layer: int
    params: AttentionParams
    has_mask: bool
    is_causal: bool
    is_latent: bool = False
    """Whether the value is the first numbers of the key."""
    sparse: AnyIndexCall | None = None
    """None if a token attends to all that it sees."""
    compressed: CompressedCall | None = None
    """None if a token attends to nothing but tokens."""
    bias: DistanceBias | None = None
    """None if scores are products of queries and keys alone."""

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor) -> "AttentionCall":
        """Returns another call of the same layer, with its constants and these tensors."""
        return AttentionCall(query, key, value, *self[3:])


class AttentionHandler(Protocol):
    def attend(self, call: AttentionCall) -> Tensor:
        """Runs attention for one layer; returns [num_tokens, num_heads, head_size_v]."""


_handler: ContextVar[AttentionHandler] = ContextVar("attention_handler")


@contextmanager
def attention_handler(handler: AttentionHandler) -> Iterator[None]:
    """Routes every attention layer that runs inside this context to `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def attend(call: AttentionCall) -> Tensor:
    """Runs attention through the current context's handler; returns [num_tokens, num_heads, head_size_v]."""
    return _handler.get().attend(call)


def register() -> None:
    """Registers `attn_implementation="twostep"` with transformers. Idempotent."""
    from transformers import AttentionInterface  # what runs in the kernels as a whole does without its seconds

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_size]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    value: Tensor,  # [1, num_kv_heads, num_tokens, head_size_v]
    attention_mask: Tensor | PoolIndexCall | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: IndexCall | None = None,
    block_indices: BlockIndexCall | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if not isinstance(indices, IndexCall | None) or not isinstance(block_indices, BlockIndexCall | None):
        raise TypeError("the positions that it attends to are chosen in a way that is not known here")
    pools = attention_mask if isinstance(attention_mask, PoolIndexCall) else None
    heads, queries = _latent_heads_of(module), query[0].transpose(0, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        query=queries if heads is None else heads.absorb(queries),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        params=AttentionParams(scaling, sliding_window, softcap, s_aux),
        has_mask=isinstance(attention_mask, Tensor) and hides_something(attention_mask),
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        is_latent=heads is not None,
        sparse=indices or block_indices or pools,
    )
    output = attend(call)
    return (output if heads is None else heads.expand(output))[None], None


def hides_something(attention_mask: Tensor | None) -> bool:
    """Whether a layer is given a mask of its own: it is given none, or an empty one, where the cache says what it
    sees."""
    return attention_mask is not None and attention_mask.numel() > 0


def _latent_heads_of(module: nn.Module) -> LatentHeads | None:
    """Returns what has taken the place of the layer that makes keys and values of latents."""
    heads = module._modules.get("kv_b_proj")
    return heads if isinstance(heads, LatentHeads) else None
