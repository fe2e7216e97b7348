"""Paged attention in Triton: one kernel for prefill and decode, and one that merges the parts of long contexts.

A context is cut into splits of `SPLIT` positions, counted from position 0. Each split has a softmax of its own, and
splits are merged in order, by one program or, where few queries would leave the GPU idle, from partial results that
several programs wrote. Either way a query meets the same tiles of keys and the same merges: its result depends on its
own context alone, bit for bit. Tiles that a query does not see, which its neighbours in the batch may bring, change
nothing: they add zeros, and merge as what is neutral. Weights are summed as the values are, by a product of matrices,
so that no layout of a tile changes the order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.cuda.attention_plan import SPLIT, Layer, Plan
from engine.kernels.cuda.hadamard import inverse_transformed, undone
from engine.kernels.cuda.kv_rows import load_numbers, store_numbers

__all__ = ["attend_paged", "write_rows"]

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_INFINITY: tl.constexpr = tl.constexpr(float("inf"))
_ONES: tl.constexpr = tl.constexpr(16)  # columns of ones that weights are multiplied by


def attend_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    starts: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    plan: Plan,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each query token over the cached context of its sequence.

    query: [T, heads, size]; keys: [blocks, kv heads, block size, size], or for a plan that knows of few bits, size of a
    row (`engine.kernels.cuda.kv_rows`); values the same with a size of their own; block_tables: [S, max blocks];
    starts: [S + 1], where each sequence's tokens begin; context_lens: [S], 0 for one that only fills the batch up;
    sinks: [heads]. A token sees `window` positions, its own included. Returns
    [T, heads, size of a value] in the type of `query`.
    """
    num_tokens, num_heads, _ = query.shape
    num_seqs, max_splits = len(context_lens), triton.cdiv(max_context_len, SPLIT)
    output = query.new_empty(num_tokens, num_heads, plan.constants["SIZE_V"])
    partial = _Partial.empty(output, max_splits if plan.num_parts > 1 else 0)
    params = (0 if window is None else window, scaling, 0.0 if softcap is None else softcap, max_splits)
    kinds = {"HAS_WINDOW": window is not None, "HAS_SINKS": sinks is not None, "enable_fp_fusion": False}
    _attend_kernel[plan.grid](
        query, keys, values, sinks, block_tables, starts, context_lens, output, *partial, num_seqs, num_tokens,
        num_heads, *params, *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], block_tables.stride(0),
        BLOCK=keys.shape[2], SPLIT=SPLIT, HAS_SOFTCAP=softcap is not None, **kinds, **plan.constants,
    )  # fmt: skip
    if plan.num_parts > 1:
        size = {name: plan.constants[name] for name in ("SIZE_V", "SIZE_V_PADDED", "KV_BITS")}
        _merge_kernel[(num_tokens, num_heads)](
            sinks, starts, context_lens, output, *partial, num_seqs, num_tokens, max_splits, params[0],
            SPLIT=SPLIT, num_warps=1, **size, **kinds,
        )  # fmt: skip
    return output


class _Partial(NamedTuple):
    """What the splits of a context came to, for each token and head, all in float32."""

    weighted: Tensor  # [T, heads, splits, size of a value]
    tops: Tensor  # [T, heads, splits]
    totals: Tensor  # [T, heads, splits]

    @classmethod
    def empty(cls, output: Tensor, num_splits: int) -> "_Partial":
        """Returns memory for the partial results of `output` [T, heads, size of a value]; none for no splits."""
        shape = (*output.shape[:2], num_splits)
        sizes = (*shape, output.shape[2]), shape, shape
        return cls(*(output.new_empty(size, dtype=torch.float32) for size in sizes))


@triton.jit
def _owner_of(place, starts, num_seqs, TOKENS: tl.constexpr, IS_TILE: tl.constexpr):
    """Returns the sequence of a token, or of a tile: a sequence has a tile more than its whole ones."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) // TOKENS + IS_TILE * middle <= place
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _place_of(tile, starts, num_seqs, num_tokens, TOKENS: tl.constexpr):
    """Returns the sequence that the tile belongs to, and its first token."""
    seq = tile
    first_token = tile
    if num_tokens != num_seqs:
        seq = _owner_of(tile, starts, num_seqs, TOKENS, 1)
        start = tl.load(starts + seq)
        first_token = start + (tile - start // TOKENS - seq) * TOKENS
    return seq, first_token


@triton.jit
def _nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Returns the sums of no keys at all: largest scores, totals and weighted values."""
    top, total = tl.full((ROWS,), -_INFINITY, tl.float32), tl.zeros((ROWS,), tl.float32)
    return top, total, tl.zeros((ROWS, SIZE), tl.float32)


@triton.jit
def _merged(top, total, weighted, top_more, total_more, weighted_more):
    """Returns the softmax sums of two sets of keys together; one without any visible key changes nothing."""
    both = tl.maximum(top, top_more)
    finite = tl.where(both == -_INFINITY, 0.0, both)
    scale, scale_more = tl.exp2(top - finite), tl.exp2(top_more - finite)
    total = total * scale + total_more * scale_more
    return both, total, weighted * scale[:, None] + weighted_more * scale_more[:, None]


@triton.jit
def _result(
    top, total, weighted, sinks, head, mask, SIZE_V: tl.constexpr, SIZE_V_PADDED: tl.constexpr,
    KV_BITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Returns the weighted mean of the values; no result is -0."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * _LOG2_E
        top, total, weighted = _merged(top, total, weighted, sink, tl.full(sink.shape, 1.0, tl.float32), weighted * 0.0)
    mean = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    if KV_BITS:
        mean = undone(mean, SIZE_V, SIZE_V_PADDED)
    return mean + 0.0


@triton.jit
def _scores(
    q, k, key_position, position, scaling, softcap, window, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Returns the scores of a tile in units of ln(2), -inf where a row does not see the key."""
    scores = tl.dot(q, k, input_precision="ieee") * scaling
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / softcap * (2.0 * _LOG2_E))))
    is_visible = key_position[None, :] <= position[:, None]
    if HAS_WINDOW:
        is_visible &= key_position[None, :] > position[:, None] - window
    return tl.where(is_visible, scores * _LOG2_E, -_INFINITY)


@triton.jit
def _sums_of_split(
    q, position, keys, values, block_table, first, last, context_len, scaling, softcap, window,
    key_block, key_slot, value_block, value_slot,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, SIZE_V: tl.constexpr,
    SIZE_V_PADDED: tl.constexpr, TILE: tl.constexpr, KV_BITS: tl.constexpr, LEVELS_V: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Returns each row's largest score, its sum of weights and of weighted values, of the keys [first, last)."""
    top, _, weighted = _nothing(q.shape[0], SIZE_V_PADDED)
    ones, totals = tl.full((TILE, _ONES), 1.0, tl.float32).to(q.dtype), tl.zeros((q.shape[0], _ONES), tl.float32)
    for at in range(first, last, TILE):
        key_position = at + tl.arange(0, TILE)
        exists = key_position < context_len
        block = tl.load(block_table + key_position // BLOCK, mask=exists, other=0).to(tl.int64)
        k_at = keys + block * key_block + key_position % BLOCK * key_slot
        k = _load_keys(k_at, exists, SIZE, SIZE_PADDED, KV_BITS, ALIGNED)
        scores = _scores(q, k.to(q.dtype), key_position, position, scaling, softcap, window, HAS_WINDOW, HAS_SOFTCAP)
        top_next = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(top_next == -_INFINITY, 0.0, top_next)
        weights = tl.exp2(scores - finite[:, None]).to(q.dtype)
        scale = tl.exp2(top - finite)
        v_at = values + block * value_block + key_position % BLOCK * value_slot
        if KV_BITS:
            v = load_numbers(v_at, exists, SIZE_V, SIZE_V_PADDED, LEVELS_V, KV_BITS, ALIGNED)
        else:
            v = _load_rows(v_at, exists, SIZE_V, SIZE_V_PADDED)
        totals = tl.dot(weights, ones, totals * scale[:, None], input_precision="ieee")
        weighted = tl.dot(weights, v.to(q.dtype), weighted * scale[:, None], input_precision="ieee")
        top = top_next
    return top, tl.max(totals, 1), weighted


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "max_splits", "window"])
def _attend_kernel(
    query, keys, values, sinks, block_tables, starts, context_lens, output, partial_weighted, partial_tops,
    partial_totals, num_seqs, num_tokens, num_heads, window, scaling, softcap, max_splits,
    query_token, query_head, key_block, key_head, key_slot, value_block, value_head, value_slot, table_row,
    SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, SIZE_V: tl.constexpr,
    SIZE_V_PADDED: tl.constexpr, TILE: tl.constexpr, KV_BITS: tl.constexpr, LEVELS_V: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attends one tile of query rows, tokens and heads, over every `num_programs(2)`-th split of its context."""
    ROWS: tl.constexpr = HEADS * TOKENS
    kv_head = tl.program_id(1) // tl.cdiv(GROUP, HEADS)
    seq, first_token = _place_of(tl.program_id(0), starts, num_seqs, num_tokens, TOKENS)
    seq_end, context_len = tl.load(starts + seq + 1), tl.load(context_lens + seq)
    token = first_token + tl.arange(0, ROWS) // HEADS
    in_group = tl.program_id(1) % tl.cdiv(GROUP, HEADS) * HEADS + tl.arange(0, ROWS) % HEADS
    head = kv_head * GROUP + in_group
    is_row = (token < seq_end) & (in_group < GROUP)
    q = _load_queries(query + token.to(tl.int64) * query_token + head * query_head, is_row, SIZE, SIZE_PADDED, KV_BITS)
    first_position = context_len - seq_end + first_token
    end = tl.where(first_token < seq_end, tl.minimum(context_len, first_position + TOKENS), 0)
    begin = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
    top, total, weighted = _nothing(ROWS, SIZE_V_PADDED)
    for split in range(begin // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        top_here, total_here, weighted_here = _sums_of_split(
            q, context_len - seq_end + token, keys + kv_head * key_head, values + kv_head * value_head,
            block_tables + seq * table_row, tl.maximum(split * SPLIT, begin // TILE * TILE),
            tl.minimum(split * SPLIT + SPLIT, end), context_len, scaling, softcap, window, key_block, key_slot,
            value_block, value_slot, BLOCK, SIZE, SIZE_PADDED, SIZE_V, SIZE_V_PADDED, TILE, KV_BITS, LEVELS_V,
            ALIGNED, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        if tl.num_programs(2) > 1:
            at = (token.to(tl.int64) * num_heads + head) * max_splits + split
            _store_rows(partial_weighted, at, weighted_here, is_row, SIZE_V, SIZE_V_PADDED)
            _store_numbers(partial_tops + at, top_here, partial_totals + at, total_here, is_row)
        else:
            top, total, weighted = _merged(top, total, weighted, top_here, total_here, weighted_here)
    if tl.num_programs(2) == 1:
        result = _result(top, total, weighted, sinks, head, is_row, SIZE_V, SIZE_V_PADDED, KV_BITS, HAS_SINKS)
        at = token.to(tl.int64) * num_heads + head
        _store_rows(output, at, result.to(output.dtype.element_ty), is_row, SIZE_V, SIZE_V_PADDED)


@triton.jit
def _load_keys(
    rows, mask, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, KV_BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Loads the numbers of the keys at these pointers as columns, as a product with queries takes them."""
    if KV_BITS:
        columns = load_numbers(rows, mask, SIZE, SIZE_PADDED, SIZE, KV_BITS, ALIGNED).trans()
    else:
        size = tl.arange(0, SIZE_PADDED)
        columns = tl.load(rows[None, :] + size[:, None], mask=mask[None, :] & (size[:, None] < SIZE), other=0.0)
    return columns


@triton.jit
def _load_rows(rows, mask, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr):
    """Loads the numbers of the rows at these pointers, zeros in place of those that the mask leaves out."""
    size = tl.arange(0, SIZE_PADDED)
    return tl.load(rows[:, None] + size[None, :], mask=mask[:, None] & (size[None, :] < SIZE), other=0.0)


@triton.jit
def _load_queries(rows, mask, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, KV_BITS: tl.constexpr):
    """Loads queries, transformed if keys are."""
    q = _load_rows(rows, mask, SIZE, SIZE_PADDED)
    if KV_BITS:
        q = inverse_transformed(q.to(tl.float32), SIZE, SIZE_PADDED).to(q.dtype)
    return q


@triton.jit
def _store_numbers(tops_at, tops, totals_at, totals, mask):
    tl.store(tops_at, tops, mask=mask)
    tl.store(totals_at, totals, mask=mask)


@triton.jit
def _store_rows(rows, at, numbers, mask, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr):
    """Stores `numbers` in the rows at these places."""
    size = tl.arange(0, SIZE_PADDED)
    tl.store(rows + at[:, None] * SIZE + size[None, :], numbers, mask=mask[:, None] & (size[None, :] < SIZE))


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "max_splits", "window"])
def _merge_kernel(
    sinks, starts, context_lens, output, partial_weighted, partial_tops, partial_totals,
    num_seqs, num_tokens, max_splits, window,
    SPLIT: tl.constexpr, SIZE_V: tl.constexpr, SIZE_V_PADDED: tl.constexpr, KV_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one token and head, in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    seq = token
    if num_tokens != num_seqs:
        seq = _owner_of(token, starts, num_seqs, 1, 0)
    size_v = tl.arange(0, SIZE_V_PADDED)
    position = tl.load(context_lens + seq) - tl.load(starts + seq + 1) + token
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0)
    place = token.to(tl.int64) * tl.num_programs(1) + head
    one = tl.zeros((1,), tl.int32)
    top, total, weighted = _nothing(1, SIZE_V_PADDED)
    for split in range(begin // SPLIT, tl.cdiv(position + 1, SPLIT)):
        at = place * max_splits + split
        weighted_at = partial_weighted + at * SIZE_V + size_v[None, :]
        weighted_here = tl.load(weighted_at, mask=size_v[None, :] < SIZE_V, other=0.0)
        top_here, total_here = tl.load(partial_tops + at + one), tl.load(partial_totals + at + one)
        top, total, weighted = _merged(top, total, weighted, top_here, total_here, weighted_here)
    result = _result(top, total, weighted, sinks, head + one, one == 0, SIZE_V, SIZE_V_PADDED, KV_BITS, HAS_SINKS)
    tl.store(
        output + place * SIZE_V + size_v[None, :], result.to(output.dtype.element_ty), mask=size_v[None, :] < SIZE_V
    )


def write_rows(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor, layer: Layer) -> None:
    """Stores each token's key [T, kv heads, size] and value in its slot [T] of the paged `keys` and `values`, whose
    layout is that of `attend_paged`; slots below 0 are left out."""
    constants = {"SIZE": layer.size, "SIZE_V": layer.size_v, "BLOCK": keys.shape[2], "PADDED": max(layer.padded)}
    constants |= {"KV_BITS": layer.kv_bits, "IS_LATENT": layer.is_latent}
    num_warps = max(1, max(layer.padded) // 64) if layer.kv_bits else 1
    _write_kernel[key.shape[:2]](
        key, value, keys, values, slot_mapping, *key.stride(), *value.stride(), *keys.stride()[:3],
        *values.stride()[:3], **constants, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _write_kernel(
    key, value, keys, values, slots, key_token, key_head, key_step, value_token, value_head, value_step,
    keys_block, keys_head, keys_slot, values_block, values_head, values_slot,
    SIZE: tl.constexpr, SIZE_V: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, KV_BITS: tl.constexpr,
    IS_LATENT: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, place, at = slot // BLOCK, slot % BLOCK, tl.arange(0, PADDED)
        k = tl.load(key + token * key_token + head * key_head + at * key_step, mask=at < SIZE, other=0.0)
        row = keys + block * keys_block + head * keys_head + place * keys_slot
        _store_row(row, k, SIZE, PADDED, KV_BITS)
        if not IS_LATENT:
            v = tl.load(value + token * value_token + head * value_head + at * value_step, mask=at < SIZE_V, other=0.0)
            row = values + block * values_block + head * values_head + place * values_slot
            _store_row(row, v, SIZE_V, PADDED, KV_BITS)


@triton.jit
def _store_row(row, numbers, SIZE: tl.constexpr, PADDED: tl.constexpr, KV_BITS: tl.constexpr):
    if KV_BITS:
        store_numbers(row, numbers.to(tl.float32)[None, :], SIZE, PADDED, KV_BITS)
    else:
        at = tl.arange(0, PADDED)
        tl.store(row + at, numbers.to(row.dtype.element_ty), mask=at < SIZE)
