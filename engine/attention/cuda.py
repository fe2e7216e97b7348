"""Paged attention on CUDA devices, by kernels in Triton."""

from torch import Tensor

from engine.attention.kv_cache import LayerCache
from engine.attention.kv_format import num_bits
from engine.attention.metadata import AttentionMetadata, AttentionParams
from engine.attention.reference import choose_slots
from engine.kernels.cuda.attention import attend_paged, write_rows
from engine.kernels.cuda.attention_plan import Layer, plan_for
from engine.kernels.cuda.decode_probe import is_decode_exact

__all__ = ["choose_slots", "paged_attention", "write_kv"]


def write_kv(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Stores each token's key and value in its slot of the cache; see `reference.write_kv`. Slots below 0 are left out,
    for tokens that only fill a batch up."""
    write_rows(key, value, *cache, slot_mapping, _layer(key, cache))


def paged_attention(query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
    """Causal attention of each query token over the cached context of its sequence; see `reference.paged_attention`.

    A sequence whose context has no length only fills a batch up.
    """
    layer = _layer(query, cache)
    num_seqs, longest = len(metadata.context_lens), metadata.max_context_len
    plan = plan_for(layer, len(query), num_seqs, longest, is_decode_exact(layer))
    return attend_paged(
        query,
        *cache,
        metadata.block_tables,
        metadata.cu_seqlens_q,
        metadata.context_lens,
        longest,
        plan,
        params.scaling,
        params.sliding_window,
        params.softcap,
        params.sinks,
    )


def _layer(heads: Tensor, cache: LayerCache) -> Layer:
    """Returns the layer with this cache whose queries or keys are `heads` [T, heads, size]."""
    _, num_heads, size = heads.shape
    shape = num_heads, cache.keys.shape[1], size, cache.head_size_v
    return Layer(heads.device, heads.dtype, *shape, num_bits(cache.keys.dtype), cache.is_latent)
