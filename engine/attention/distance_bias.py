"""Attention with a bias of each score, by the distance of the two tokens, that the later one weighs itself (Inkling).

A bias is a product, too: of a token's weights and of what each of some profiles says of a distance. So it is computed
as more numbers of queries and keys. Neighbouring tokens share keys, of which each has the profiles' numbers of its
distance to every one of them, beside each other; a query has weights where its own are, and zeros elsewhere. Which
tokens share keys is decided by their positions alone, so any backend's bits stay a function of the sequence.

A sink of each token's own is one more profile, which is 1 at all distances: scores less that sink, beside a sink of 0,
have the same softmax.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import AttentionBackend
from engine.attention.kv_cache import LayerCache
from engine.attention.kv_format import dequantize, is_quantized, undo_transform
from engine.attention.metadata import AttentionMetadata, DistanceBias
from engine.attention.registry import AttentionCall

__all__ = ["BiasedAttention"]

_NUM_SHARING = 8  # positions whose tokens share keys
_NUMBERS = 1 << 23  # of keys and values that are gathered at once


class BiasedAttention:
    """Biased attention of the tokens of one step, in all layers."""

    def __init__(self, backend: AttentionBackend, metadata: AttentionMetadata) -> None:
        self._backend, self._metadata = backend, metadata
        self._groups: _Groups | None = None

    def attend(self, call: AttentionCall, bias: DistanceBias, cache: LayerCache) -> Tensor:
        """Attends over the cache, where the tokens' own keys and values are; returns [num_tokens, num_heads,
        head_size_v]."""
        self._groups = groups = self._groups or _Groups(self._metadata)
        queries = _queries(call, bias, groups.positions)
        profiles = _profiles_of_all_sharing(bias, queries.dtype)
        params = call.params if bias.sinks is None else call.params._replace(sinks=queries.new_zeros(queries.shape[1]))
        seen = _Seen(groups, call.params.sliding_window)
        num_numbers = call.key.shape[1] * (queries.shape[2] + call.value.shape[2])
        outputs = []
        for first, end in seen.pieces(max(1, _NUMBERS // num_numbers)):
            slots, distances = seen.slots_of(first, end, cache.block_size)
            keys = _rows(cache.keys, slots, queries.dtype)
            of_distances = profiles[distances.clamp(max=len(bias.profiles)) + _NUM_SHARING - 1]
            keys = torch.cat((keys, of_distances[:, None].expand(-1, keys.shape[1], -1, -1)), dim=-1)
            gathered = LayerCache(keys, _rows(cache.values, slots, queries.dtype))
            rows = queries[groups.starts[first] : groups.starts[end]]
            outputs.append(self._backend.paged_attention(rows, gathered, seen.metadata(first, end), params))
        return torch.cat(outputs).to(call.query.dtype)


class _Groups:
    """The tokens of a step in groups, of which each has the tokens of neighbouring positions of one sequence."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        starts, ends = metadata.cu_seqlens_q.long(), metadata.context_lens.long()
        sequences = torch.arange(len(ends)).repeat_interleave(starts.diff())  # [num_tokens]
        self.positions = torch.arange(len(sequences)) + (ends - starts[1:])[sequences]  # [num_tokens]
        is_first = (self.positions % _NUM_SHARING == 0).index_fill_(0, starts[:-1][starts.diff() > 0], True)
        firsts = is_first.nonzero()[:, 0]
        self.starts: list[int] = [*firsts.tolist(), len(sequences)]
        """The tokens of group i are [starts[i], starts[i + 1])."""
        self.sequences = sequences[firsts]  # [num_groups]
        self.firsts = self.positions[firsts]  # [num_groups]
        self.bases = self.firsts // _NUM_SHARING * _NUM_SHARING  # [num_groups]
        self.ends = self.positions[torch.tensor(self.starts[1:]) - 1] + 1  # [num_groups]


class _Seen:
    """Which positions each group sees: [first, end), from what the first token sees that it could have."""

    def __init__(self, groups: _Groups, window: int | None) -> None:
        self._groups = groups
        self._window = window or int(groups.ends.max())
        self._firsts = (groups.bases + 1 - self._window).clamp(min=0)
        self._counts = groups.ends - self._firsts

    def pieces(self, most_positions: int) -> list[tuple[int, int]]:
        """Returns ranges of groups that see so many positions together, if not one group sees more."""
        longest = int(self._counts.max())
        count = max(1, most_positions // longest)
        return [(first, min(first + count, len(self._counts))) for first in range(0, len(self._counts), count)]

    def slots_of(self, first: int, end: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Returns the slots [groups, positions] in the cache of what these groups see, and distances from it to the
        first token that a group could have. Around what the tokens see that it has, stand slots of this: blocks before
        the window may be another sequence's by now."""
        groups, part = self._groups, slice(first, end)
        positions = self._firsts[part, None] + torch.arange(int(self._counts[part].max()))
        distances = groups.bases[part, None] - positions
        seen = (groups.firsts[part, None] + 1 - self._window).clamp(min=0)
        positions = positions.clamp(min=seen, max=groups.ends[part, None] - 1)
        blocks = groups.metadata.block_tables.long()[groups.sequences[part, None], positions // block_size]
        return blocks * block_size + positions % block_size, distances.clamp(min=1 - _NUM_SHARING)

    def metadata(self, first: int, end: int) -> AttentionMetadata:
        """Returns what has each of these groups see a block of its own."""
        starts, counts = self._groups.starts[first : end + 1], self._counts[first:end].int()
        return replace(
            self._groups.metadata,
            block_tables=torch.arange(end - first, dtype=torch.int32)[:, None],
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32) - starts[0],
            context_lens=counts,
            max_seqlen_q=_NUM_SHARING,
            max_context_len=int(counts.max()),
        )


def _queries(call: AttentionCall, bias: DistanceBias, positions: Tensor) -> Tensor:
    """Returns queries [num_tokens, num_heads, head size + those of profiles], of the type that keys are to have."""
    query, weights = call.query, bias.weights
    if bias.log_scaling is not None:
        factors = bias.log_scaling.factors(positions)[:, None, None]
        query, weights = ((each.float() * factors).to(each.dtype) for each in (query, weights))
    if bias.sinks is not None:
        weights = torch.cat((weights, -bias.sinks[..., None]), dim=-1)
    num_tokens, num_heads, num_profiles = weights.shape
    places = query.new_zeros(num_tokens, num_heads, _NUM_SHARING, num_profiles)
    places[torch.arange(num_tokens), :, positions % _NUM_SHARING] = weights / call.params.scaling
    return torch.cat((query, places.flatten(2)), dim=-1)


def _profiles_of_all_sharing(bias: DistanceBias, dtype: torch.dtype) -> Tensor:
    """Returns what keys have of all profiles: of the distance d to the first token that a group could have the row
    d + _NUM_SHARING - 1, and of all larger ones that of d = num_distances."""
    padded = functional.pad(bias.profiles.to(dtype), (0, 0, _NUM_SHARING - 1, _NUM_SHARING))
    if bias.sinks is not None:
        padded = functional.pad(padded, (0, 1), value=1.0)
    return padded.unfold(0, _NUM_SHARING, 1).transpose(1, 2).flatten(1)


def _rows(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows in these slots [groups, positions] of a cache [num_blocks, num_heads, block_size, row size], as
    numbers: [groups, num_heads, positions, size]."""
    _, num_heads, block_size, size = cache.shape
    heads = torch.arange(num_heads)[:, None]
    places = (slots[:, None] // block_size * num_heads + heads) * block_size + slots[:, None] % block_size
    rows = cache.view(-1, size).index_select(0, places.flatten())
    if is_quantized(cache.dtype):
        rows = undo_transform(dequantize(rows))
    return rows.to(dtype).view(*places.shape, -1)
