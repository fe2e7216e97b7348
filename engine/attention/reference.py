"""Paged attention in plain torch, for any device: the test oracle of the kernels, and the fallback without them.

The result of a query row is bit for bit a function of its query, its keys and values in position order, and the
parameters; the rest of the batch, the block size and the number of threads do not affect it. Torch's reductions and
matmuls choose their order of summation by shape and its `exp` by lane, so neither is used: everything below is
elementwise arithmetic that IEEE 754 defines exactly, and each sum is a tree of halves over a padded tile of fixed size.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.kv_cache import LayerCache
from engine.attention.kv_format import dequantize, is_quantized, quantize, transform_queries, undo_transform
from engine.attention.metadata import AttentionMetadata, AttentionParams, IndexCall

_TILE = 64  # keys summed as one tree; tiles are cut at multiples of it, counted from position 0
_ROWS_AT_ONCE = 8  # query tokens handled together, for the size of intermediate tensors only
_EXP_TERMS = 14  # of the Taylor series on [-ln(2) / 2, ln(2) / 2], for double precision
_LN2_HIGH = 0.693147180369123816490  # the leading 33 bits of ln(2): a product with a small integer is exact
_LN2_LOW = 1.90821492927058770002e-10  # the rest of ln(2)


def write_kv(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Stores each token's key and value in its slot of the cache, which changes in place.

    key: [num_tokens, num_kv_heads, head_size], value: [num_tokens, num_kv_heads, head_size_v], of any strides;
    slot_mapping: [num_tokens], no slot twice.
    """
    blocks, offsets = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    stored = ((cache.keys, key), (cache.values, value))
    for tensor, rows in stored[: 1 if cache.is_latent else 2]:
        dtype = tensor.dtype
        tensor[blocks, :, offsets] = quantize(rows, dtype) if is_quantized(dtype) else rows.to(dtype)


def paged_attention(query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
    """Causal attention of each query token over the cached context of its sequence.

    query: [num_tokens, num_heads, head_size]; query head h reads kv head h // (num_heads / num_kv_heads). A token at
    position p sees positions <= p, and > p - sliding_window if there is one. Returns [num_tokens, num_heads,
    head_size_v] in query's dtype.
    """
    if is_quantized(cache.keys.dtype):
        attended = _attend(transform_queries(query), cache, metadata, params)
        return (undo_transform(attended) + 0.0).to(query.dtype)  # no result is -0
    return _attend(query, cache, metadata, params)


def choose_slots(index: IndexCall, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Chooses `index.num_chosen` of the positions that each token sees, by the index keys of a layer, `cache`
    [num_blocks, block_size, index_size].

    A better score comes first, and of equal ones the earlier position; in torch's `topk` these come in any order.
    Returns slots [num_tokens, num_chosen] int32 in the order of positions; zeros fill rows of tokens that see fewer.
    """
    starts, block_size = metadata.cu_seqlens_q.tolist(), cache.shape[1]
    chosen = []
    for i, context_len in enumerate(metadata.context_lens.tolist()):
        table = metadata.block_tables[i, : math.ceil(context_len / block_size)].long()
        keys = cache[table].flatten(0, 1)[:context_len].float()
        for token in range(starts[i], starts[i + 1]):
            num_seen = context_len - starts[i + 1] + token + 1
            scores = _index_scores(index.query[token].float(), index.weights[token], keys[:num_seen])
            best = scores.sort(descending=True, stable=True).indices[: index.num_chosen].sort().values
            slots = table[best // block_size] * block_size + best % block_size
            chosen.append(functional.pad(slots, (0, index.num_chosen - len(slots))).int())
    return torch.stack(chosen)


def _index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of one token: query [heads, size], weights [heads], keys [context, size] -> [context]."""
    scores = []
    for begin in range(0, len(keys), _TILE):
        products = _tree_sum(query[:, None] * keys[begin : begin + _TILE], -1).relu()  # [heads, keys of the tile]
        scores.append(_tree_sum(products * weights[:, None], 0))
    return torch.cat(scores)


def _attend(query: Tensor, cache: LayerCache, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
    """Attention in the numbers that the cache has, transformed ones or not."""
    window = params.sliding_window
    num_tokens, num_heads, _ = query.shape
    output = query.new_empty(num_tokens, num_heads, cache.head_size_v)
    starts = metadata.cu_seqlens_q.tolist()
    for i, context_len in enumerate(metadata.context_lens.tolist()):
        keys = _gather(cache.keys, metadata.block_tables[i], context_len, num_heads)
        values = keys[..., : cache.head_size_v]
        if not cache.is_latent:
            values = _gather(cache.values, metadata.block_tables[i], context_len, num_heads)
        # Sequence i owns the tokens [starts[i], starts[i + 1]); token t has position t + to_position.
        to_position = context_len - starts[i + 1]
        for begin in range(starts[i], starts[i + 1], _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, starts[i + 1])
            positions = torch.arange(begin + to_position, end + to_position, device=query.device)
            tiles = _visible_tiles(begin + to_position, end - 1 + to_position, window)
            scores = _scores(query[begin:end].float(), keys[:, tiles], params.scaling, params.softcap)
            visible = _visible(positions, tiles, window)
            scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
            output[begin:end] = _softmax_times_values(scores, values[:, tiles], params.sinks).to(query.dtype)
    return output


def _gather(cache: Tensor, block_table: Tensor, context_len: int, num_heads: int) -> Tensor:
    """Gathers one sequence's cache entries in position order, per query head, zero-padded to whole tiles.

    Returns [num_heads, context_len rounded up to whole tiles, head size] in float32.
    """
    _, num_kv_heads, block_size, row_size = cache.shape
    blocks = cache[
        block_table[: math.ceil(context_len / block_size)].long()
    ]  # [blocks, kv heads, block size, row size]
    rows = blocks.transpose(0, 1).reshape(num_kv_heads, -1, row_size)[:, :context_len]
    entries = dequantize(rows) if is_quantized(rows.dtype) else rows.float()
    entries = functional.pad(entries, (0, 0, 0, -context_len % _TILE))
    return entries.repeat_interleave(num_heads // num_kv_heads, dim=0)


def _scores(query: Tensor, keys: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Attention scores: query [rows, num_heads, size], keys [num_heads, context, size] -> [rows, num_heads, context].

    The result is float32.
    """
    tiles = [_tree_sum(query[:, :, None, :] * tile, -1) for tile in _tiles(keys, 1)]
    scores = torch.cat(tiles, dim=-1) * scaling
    return scores if softcap is None else softcap * _tanh(scores / softcap)


def _visible_tiles(first: int, last: int, sliding_window: int | None) -> slice:
    """The whole tiles [start, stop) that hold every key some row at positions first to last sees."""
    start = 0 if sliding_window is None else max(0, first - sliding_window + 1)
    return slice(start // _TILE * _TILE, (last // _TILE + 1) * _TILE)


def _visible(positions: Tensor, tiles: slice, sliding_window: int | None) -> Tensor:
    """Returns which keys of the tiles each row may see: [rows, number of keys] bool."""
    key_positions = torch.arange(tiles.start, tiles.stop, device=positions.device)
    visible = key_positions <= positions[:, None]
    if sliding_window is not None:
        visible &= key_positions > positions[:, None] - sliding_window
    return visible


def _softmax_times_values(scores: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [rows, num_heads, context] times values [num_heads, context, size], with a running total.

    Returns [rows, num_heads, size] in float32.
    """
    maximum = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        maximum = torch.maximum(maximum, sinks.float()[:, None])
    weights = _exp((scores - maximum).double()).float()
    total = torch.zeros_like(maximum)
    if sinks is not None:
        total = _exp((sinks.float()[:, None] - maximum).double()).float()
    weighted = scores.new_zeros(*scores.shape[:2], values.shape[2])
    for weight, value in zip(_tiles(weights, 2), _tiles(values, 1), strict=True):
        weighted = weighted + _tree_sum(weight[..., None] * value, -2)
        total = total + _tree_sum(weight.clone(), -1)[..., None]
    return weighted / total + 0.0  # a masked key adds a zero of either sign: -0 becomes +0


def _tiles(x: Tensor, dim: int) -> Iterator[Tensor]:
    """Splits `x` along `dim`, which is whole tiles long, into tiles of _TILE keys in position order."""
    return (x.narrow(dim, begin, _TILE) for begin in range(0, x.shape[dim], _TILE))


def _tree_sum(terms: Tensor, dim: int) -> Tensor:
    """Sums over `dim` as a tree of halves, whose shape only that dimension's size decides. Overwrites `terms`."""
    size = terms.shape[dim]
    while size > 1:
        half = (size + 1) // 2
        terms.narrow(dim, 0, size - half).add_(terms.narrow(dim, half, size - half))
        size = half
    return terms.select(dim, 0)


def _exp(x: Tensor) -> Tensor:
    """e**x of float64 x <= 0, from exactly defined elementwise steps: e**x = 2**n * e**r with |r| <= ln(2) / 2."""
    clamped = x.clamp(min=-700.0)
    n = (clamped * (1.0 / math.log(2.0))).round()
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    series = torch.full_like(r, 1.0 / math.factorial(_EXP_TERMS - 1))
    for k in reversed(range(_EXP_TERMS - 1)):
        series = series * r + 1.0 / math.factorial(k)
    power_of_two = ((n.long() + 1023) << 52).view(torch.float64)
    return torch.where(x < -700.0, 0.0, series * power_of_two)


def _tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent of float32 x, through float64 so that nothing is lost near zero."""
    decay = _exp(-2.0 * x.double().abs())
    return ((1.0 - decay) / (1.0 + decay)).float().copysign(x)
