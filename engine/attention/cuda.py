"""Paged attention on CUDA devices by torch's own FlashAttention (`torch.nn.attention.varlen`).

Torch's built-in FlashAttention 2 takes no block table, so the context is gathered out of its blocks first. Where
FlashAttention 3 is installed (package `flash_attn_interface`, Hopper GPUs) it reads the blocks in place. What neither
supports (softcap, sinks, float32, head sizes that are not multiples of 8 or above 256, a value size other than the
key's) falls back to the reference, with one warning in the log. `varlen_attn` grows with torch: what an older one takes
no argument for is done here, or by the reference.
"""

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from engine.attention import reference
from engine.attention.kv_cache import LayerCache
from engine.attention.metadata import AttentionMetadata, AttentionParams

logger = logging.getLogger(__name__)

write_kv = reference.write_kv

_ALWAYS_PASSED = ("scale", "window_size")
_PASSED_WITH_BLOCKS = ("seqused_k", "block_table", "num_splits")


def paged_attention(query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
    """Causal attention of each query token over the cached context of its sequence; see `reference.paged_attention`."""
    reason = unsupported_by_flash(query, cache, params)
    if reason is not None:
        _warn_once(reason)
        return reference.paged_attention(query, cache, metadata, params)
    run = _attend_blocks if _has_flash3(query.device) else _attend_gathered
    return run(query, cache, metadata, params.scaling, _window(params.sliding_window))


def unsupported_by_flash(query: Tensor, cache: LayerCache, params: AttentionParams) -> str | None:
    """Names the first feature of the call that FlashAttention does not support; None when it supports all of them."""
    head_size = query.shape[2]
    unsupported = {
        "softcap": params.softcap is not None,
        "attention sinks": params.sinks is not None,
        f"{query.dtype} queries on a {cache.keys.dtype} cache": (
            query.dtype not in (torch.float16, torch.bfloat16) or query.dtype != cache.keys.dtype
        ),
        f"head size {head_size}": head_size % 8 != 0 or head_size > 256,
        f"value size {cache.values.shape[3]} with head size {head_size}": cache.values.shape[3] != head_size,
        f"scaling or windows in torch {torch.__version__}": not _takes(*_ALWAYS_PASSED),
        "compute capability below 8.0": query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0),
    }
    return next((feature for feature, is_needed in unsupported.items() if is_needed), None)


def _window(sliding_window: int | None) -> tuple[int, int]:
    """Returns how many keys a token sees to the left and to the right of its own, -1 for all.

    FlashAttention aligns the last query with the last key.
    """
    return (-1 if sliding_window is None else sliding_window - 1, 0)


def _attend_gathered(
    query: Tensor, cache: LayerCache, metadata: AttentionMetadata, scaling: float, window: tuple[int, int]
) -> Tensor:
    """Attends over the contexts gathered out of their blocks, one after another, without padding.

    With max_q 1 and grouped heads FlashAttention 2 would take another kernel, which splits the context by what else is
    in the batch. Passing at least 2 keeps decode on the kernel of prefill, with one order of summation for both.
    """
    blocks, offsets, cu_seqlens_k = _positions(metadata, cache.block_size)
    keys, values, grouping = _grouped(query, cache.keys[blocks, :, offsets], cache.values[blocks, :, offsets])
    output = varlen_attn(
        query,
        keys,
        values,
        metadata.cu_seqlens_q,
        cu_seqlens_k,
        max(metadata.max_seqlen_q, 2),
        metadata.max_context_len,
        scale=scaling,
        window_size=window,
        **grouping,
    )
    assert isinstance(output, Tensor)
    return output


def _grouped(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Returns keys and values [tokens, heads, size] and the option that lets query heads share them.

    A torch without that option gets a copy for each query head: the same numbers in the same order.
    """
    group = query.shape[1] // keys.shape[1]
    if _takes("enable_gqa"):
        return keys, values, {"enable_gqa": group > 1}
    return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), {}


def _attend_blocks(
    query: Tensor, cache: LayerCache, metadata: AttentionMetadata, scaling: float, window: tuple[int, int]
) -> Tensor:
    """Attends through the block table; one split, so that the order of summation does not depend on the batch."""
    output = varlen_attn(
        query,
        cache.keys.transpose(1, 2),
        cache.values.transpose(1, 2),
        metadata.cu_seqlens_q,
        None,
        metadata.max_seqlen_q,
        metadata.max_context_len,
        scale=scaling,
        window_size=window,
        enable_gqa=query.shape[1] != cache.keys.shape[1],
        seqused_k=metadata.context_lens,
        block_table=metadata.block_tables,
        num_splits=1,
    )
    assert isinstance(output, Tensor)
    return output


def _takes(*options: str) -> bool:
    """Whether this torch's `varlen_attn` has all these parameters."""
    return _parameters(varlen_attn) >= set(options)


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@functools.lru_cache(maxsize=1)
def _positions(metadata: AttentionMetadata, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where all contexts' cache entries are: block ids and offsets [sum of contexts], starts [num_seqs + 1].

    The last result is cached, because all layers of a step need the same one.
    """
    lengths = metadata.context_lens.long()
    ends = lengths.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    position = torch.arange(sequence.numel(), device=lengths.device) - (ends - lengths)[sequence]
    blocks = metadata.block_tables[sequence, position // block_size].long()
    starts = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    starts[1:] = ends
    return blocks, position % block_size, starts


@functools.cache
def _has_flash3(device: torch.device) -> bool:
    """Whether FlashAttention 3 is available for `device`; if so, it is activated in place of torch's built-in one."""
    if torch.cuda.get_device_capability(device)[0] != 9 or importlib.util.find_spec("flash_attn_interface") is None:
        return False
    if not _takes("enable_gqa", *_PASSED_WITH_BLOCKS):
        logger.warning("torch %s cannot hand block tables to FlashAttention 3, which is left unused", torch.__version__)
        return False
    activate_flash_attention_impl("FA3")
    logger.info("attention by FlashAttention 3")
    return True


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("FlashAttention does not do %s: plain torch attention instead, which is much slower", reason)
