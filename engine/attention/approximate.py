"""Paged attention by matrix products: fast enough to compare models with, but its rounding depends on the batch."""

import torch
from torch import Tensor

from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams
from engine.attention.reference import choose_slots, write_kv

__all__ = ["choose_slots", "paged_attention", "write_kv"]


def paged_attention(query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
    """Returns what `engine.attention.reference.paged_attention` returns, but for rounding."""
    lengths = metadata.cu_seqlens_q.diff().tolist()
    outputs = [
        _attend(rows, cache, table, context_len, params)
        for rows, table, context_len in zip(
            query.split_with_sizes(lengths), metadata.block_tables, metadata.context_lens.tolist(), strict=True
        )
    ]
    return torch.cat(outputs)


def _attend(query: Tensor, cache: LayerCache, table: Tensor, context_len: int, params: AttentionParams) -> Tensor:
    """Attention of one sequence's newest tokens: query [T, num_heads, size] -> [T, num_heads, size of values]."""
    num_tokens, num_heads, _ = query.shape
    keys, values = (_gather(each, table, context_len, num_heads) for each in cache)
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * params.scaling  # [num_heads, T, context]
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    distance = torch.arange(context_len - num_tokens, context_len)[:, None] - torch.arange(context_len)
    window = context_len if params.sliding_window is None else params.sliding_window
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.to(scores.dtype)[:, None, None].expand(-1, num_tokens, 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :context_len] @ values).transpose(0, 1)


def _gather(cache: Tensor, table: Tensor, context_len: int, num_heads: int) -> Tensor:
    """Returns one sequence's entries in order of position, one for each query head: [num_heads, context, size]."""
    num_kv_heads, size = cache.shape[1], cache.shape[3]
    entries = cache[table.long()].transpose(0, 1).reshape(num_kv_heads, -1, size)[:, :context_len]
    return entries.repeat_interleave(num_heads // num_kv_heads, dim=0)
