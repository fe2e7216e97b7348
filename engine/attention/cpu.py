"""Paged attention by the C++ kernels (`engine/kernels/attention/attention.cpp`); the kernels must have been loaded."""

import torch
from torch import Tensor

from engine.attention import reference
from engine.attention.metadata import AttentionMetadata

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores each token's key and value in its slot of the caches, in place; see `reference.write_kv`."""
    if key.dtype != key_cache.dtype or key.dtype not in _KERNEL_DTYPES:
        reference.write_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    torch.ops.twostep.write_kv(key, value, key_cache, value_cache, slot_mapping)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each query token over the cached context of its sequence; see `reference.paged_attention`.

    The reference also runs here, for element types that the kernel does not support.
    """
    if query.dtype != key_cache.dtype or query.dtype not in _KERNEL_DTYPES:
        return reference.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
    output: Tensor = torch.ops.twostep.paged_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_tables,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        scaling,
        sliding_window,
        softcap,
        sinks,
    )
    return output
