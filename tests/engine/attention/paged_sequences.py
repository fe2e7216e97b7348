"""Test sequences with their keys and values, laid out in paged caches; and dense attention to compare with."""

import math
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.attention import AttentionBackend, AttentionMetadata, AttentionParams, LayerCache, reference
from engine.attention.kv_format import row_size
from engine.core.batch import ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.runner.model_inputs import build_inputs


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    value_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """Type of the cache; None for `dtype`."""
    is_latent: bool = False
    """Whether values are the first numbers of keys, and lie in the cache as these."""

    @property
    def scaling(self) -> float:
        return self.size**-0.5


@dataclass(frozen=True, eq=False)
class Sequence:
    """A context of keys and values, with queries for its last `query.shape[0]` positions."""

    query: Tensor  # [num_queries, heads, size]
    keys: Tensor  # [context, kv_heads, size]
    values: Tensor  # [context, kv_heads, value_size]
    kv_dtype: torch.dtype  # of the cache that it is laid out in
    is_latent: bool = False

    @property
    def context_len(self) -> int:
        return self.keys.shape[0]

    def chunk(self, begin: int, end: int) -> "Sequence":
        """Returns queries [begin, end) as a step of their own, without the keys after them."""
        context = self.context_len - self.query.shape[0] + end
        return replace(self, query=self.query[begin:end], keys=self.keys[:context], values=self.values[:context])

    def last(self, num_queries: int = 1) -> "Sequence":
        return replace(self, query=self.query[-num_queries:])


def make_sequence(shape: Shape, num_queries: int, context_len: int, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed * 7919 + context_len)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    query, keys = normal(num_queries, shape.heads, shape.size), normal(context_len, shape.kv_heads, shape.size)
    values = keys[..., : shape.value_size]
    if not shape.is_latent:
        values = normal(context_len, shape.kv_heads, shape.value_size)
    return Sequence(query, keys, values, shape.kv_dtype or shape.dtype, shape.is_latent)


@dataclass(frozen=True, eq=False)
class Paged:
    """A batch in paged caches. Every slot that no sequence owns holds NaN, so that reading one shows."""

    query: Tensor
    cache: LayerCache
    metadata: AttentionMetadata
    token_keys: Tensor  # [num_tokens, kv_heads, size] of this step's tokens
    token_values: Tensor


def lay_out(sequences: ListOf[Sequence], block_size: int = 16, placement: int = 0, device: str = "cpu") -> Paged:
    """Lays the sequences out in blocks chosen at random, with the seed `placement`."""
    counts = [math.ceil(s.context_len / block_size) for s in sequences]
    free = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(placement)).int()
    tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    first = sequences[0]
    cache = LayerCache(*(_empty_cache(x, len(free), block_size, first.kv_dtype) for x in (first.keys, first.values)))
    if first.is_latent:
        cache = LayerCache(cache.keys, cache.keys[..., : cache.values.shape[3]])
    slots = []
    for table, count, s in zip(tables, counts, sequences, strict=True):
        table[:count], free = free[:count], free[count:]
        position = torch.arange(s.context_len)
        blocks, offsets = table[position // block_size].long(), position % block_size
        reference.write_kv(s.keys, s.values, cache, blocks * block_size + offsets)
        slots.append((blocks * block_size + offsets)[s.context_len - s.query.shape[0] :])
    lengths = [s.query.shape[0] for s in sequences]
    metadata = AttentionMetadata(
        block_tables=tables.to(device),
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        context_lens=torch.tensor([s.context_len for s in sequences], dtype=torch.int32).to(device),
        slot_mapping=torch.cat(slots).to(device),
        max_seqlen_q=max(lengths),
        max_context_len=max(s.context_len for s in sequences),
    )
    new = [(s.query, s.keys[-n:], s.values[-n:]) for s, n in zip(sequences, lengths, strict=True)]
    query, keys, values = (torch.cat(parts).to(device) for parts in zip(*new, strict=True))
    moved = LayerCache(*(tensor.to(device) for tensor in cache))
    if first.is_latent:
        moved = LayerCache(moved.keys, moved.keys[..., : moved.values.shape[3]])
    return Paged(query, moved, metadata, keys, values)


def _empty_cache(like: Tensor, num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
    size = (num_blocks, like.shape[1], block_size, row_size(like.shape[2], dtype) * dtype.itemsize)
    return torch.full(size, 0xFF, dtype=torch.uint8).view(dtype)  # NaN in each type, and as a scale


def attend(backend: AttentionBackend, paged: Paged, **options: Any) -> list[Tensor]:
    """Runs `backend`; returns each sequence's rows [num_queries, heads, value_size].

    The scaling is 1 / sqrt(size) unless `options` have one.
    """
    options = {"scaling": paged.query.shape[2] ** -0.5, **options}
    output = backend.paged_attention(paged.query, paged.cache, paged.metadata, AttentionParams(**options))
    return list(output.split(paged.metadata.cu_seqlens_q.diff().tolist()))


def alone(backend: AttentionBackend, sequence: Sequence, block_size: int = 16, **options: Any) -> Tensor:
    return attend(backend, lay_out([sequence], block_size), **options)[0]


def dense_attention(
    sequence: Sequence,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention over the whole context at once, by definition, in float64."""
    num_queries, heads, size = sequence.query.shape
    group = heads // sequence.keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (sequence.keys, sequence.values))
    scores = torch.einsum("qhd,khd->qhk", sequence.query.double(), keys) * size**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_position = torch.arange(sequence.context_len)
    position = key_position[-num_queries:, None]
    hidden = key_position > position
    if sliding_window is not None:
        hidden |= key_position <= position - sliding_window
    scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None].expand(num_queries, -1, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : sequence.context_len]
    return torch.einsum("qhk,khd->qhd", weights, values).to(sequence.query.dtype)


def scattered(lengths: ListOf[int], contexts: ListOf[int], block_size: int, num_blocks: int) -> AttentionMetadata:
    """Returns a step of `lengths` tokens of each sequence, at the ends of `contexts`, whose blocks lie in any order
    among `num_blocks`; nothing is written."""
    blocks = iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist())
    counts = [-(-context // block_size) for context in contexts]
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([next(blocks) for _ in range(count)])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    of_contexts = torch.tensor(contexts, dtype=torch.int32)
    slots = torch.zeros(sum(lengths), dtype=torch.int64)
    return AttentionMetadata(tables, starts, of_contexts, slots, max(lengths), max(contexts))


Part = tuple[int, slice]
"""The number of a sequence, and which of its tokens."""


def steps_of(
    steps: ListOf[ListOf[int]], tables: ListOf[ListOf[int]], block_size: int
) -> Iterator[tuple[list[Part], AttentionMetadata]]:
    """Yields the tokens of each step, which computes so many of each sequence, and where they lie; the sequences have
    these blocks. Steps of no token are left out."""
    starts = [0] * len(tables)
    for counts in steps:
        parts = [(i, slice(starts[i], starts[i] + count)) for i, count in enumerate(counts) if count]
        requests = [
            ScheduledRequest(
                "", [0] * (part.stop - part.start), part.start, tuple(tables[i]), SamplingParams(), [], [], True
            )
            for i, part in parts
        ]
        if requests:
            yield parts, build_inputs(requests, block_size, torch.device("cpu")).attention
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


def by_sequence(num_sequences: int, outputs: ListOf[tuple[list[Part], Tensor]]) -> list[Tensor]:
    """Returns the rows of each sequence's tokens, of those of each step."""
    rows: list[list[Tensor]] = [[] for _ in range(num_sequences)]
    for parts, output in outputs:
        for (i, part), own in zip(parts, output.split([part.stop - part.start for _, part in parts]), strict=True):
            assert sum(map(len, rows[i])) == part.start
            rows[i].append(own)
    return [torch.cat(each) for each in rows]
