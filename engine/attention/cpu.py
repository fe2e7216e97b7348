"""Paged attention by the C++ kernels (`engine/kernels/attention/attention.cpp`); the kernels must have been loaded."""

import torch
from torch import Tensor

from engine.attention import reference
from engine.attention.kv_cache import LayerCache
from engine.attention.kv_format import KV_DTYPES
from engine.attention.metadata import AttentionMetadata, AttentionParams, IndexCall

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def write_kv(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Stores each token's key and value in its slot of the cache, in place; see `reference.write_kv`."""
    if not _has_kernel(key.dtype, cache):
        reference.write_kv(key, value, cache, slot_mapping)
        return
    torch.ops.twostep.write_kv(key, value, *cache, slot_mapping)


def paged_attention(query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
    """Causal attention of each query token over the cached context of its sequence; see `reference.paged_attention`.

    The reference also runs here, for element types that the kernel does not support.
    """
    if not _has_kernel(query.dtype, cache):
        return reference.paged_attention(query, cache, metadata, params)
    output: Tensor = torch.ops.twostep.paged_attention(
        query, *cache, metadata.block_tables, metadata.cu_seqlens_q, metadata.context_lens, *params
    )
    return output


def choose_slots(index: IndexCall, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Chooses the positions that each token attends to; see `reference.choose_slots`."""
    if index.query.dtype not in _KERNEL_DTYPES:
        return reference.choose_slots(index, cache, metadata)
    of_batch = metadata.block_tables, metadata.cu_seqlens_q, metadata.context_lens
    slots: Tensor = torch.ops.twostep.choose_slots(index.query, index.weights, cache, *of_batch, index.num_chosen)
    return slots


def _has_kernel(dtype: torch.dtype, cache: LayerCache) -> bool:
    """Whether kernels compute in `dtype` over this cache: one as wide, or of fewer bits."""
    return dtype in _KERNEL_DTYPES and (cache.keys.dtype == dtype or cache.keys.dtype in KV_DTYPES.values())
