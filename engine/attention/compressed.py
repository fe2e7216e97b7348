"""Compressed attention: a token attends to a window, and to entries that stand for several tokens before it each
(DeepSeek-V4, 2026).

An entry is made of raw vectors of its tokens, and of as many before them where windows overlap, once the last of its
tokens is computed; a token sees the entries whose tokens all lie at or before it. Raw vectors of all tokens stay in the
cache, and an entry lies in the block of its last token: so a block has all that a later step reads of its tokens.

Attention of a token is that of a sequence of its own, in a cache whose blocks have one row each, and whose block table
has the window first, in the order of positions, and then entries: any backend can read that.
"""

from functools import cached_property

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.kv_cache import CompressedCache
from engine.attention.metadata import AttentionMetadata, CompressedCall, IndexCall
from engine.attention.registry import AttentionCall

__all__ = ["CompressedAttention"]

_TABLE_NUMBERS = 1 << 22  # of block tables for the choice of entries that are made at once


class CompressedAttention:
    """Compressed attention of the tokens of one step, in all layers."""

    def __init__(self, backend: AttentionBackend, metadata: AttentionMetadata, block_size: int) -> None:
        self._backend, self._metadata, self._block_size = backend, metadata, block_size
        self._steps: dict[int, _Step] = {}
        self._attended: dict[tuple[int, int], AttentionMetadata] = {}

    def attend(self, call: AttentionCall, compressed: CompressedCall, cache: CompressedCache) -> Tensor:
        """Writes the tokens' keys and raw vectors, and the entries that they complete, and attends; returns
        [num_tokens, num_heads, head_size]."""
        step = self._step(compressed.ratio)
        self._backend.write_kv(call.key, call.value, cache.rows, step.rows_of_tokens)
        cache.raw.view(-1, cache.raw.shape[2])[self._metadata.slot_mapping] = compressed.raw
        if len(step.ended):
            self._write_entries(compressed, cache, step)
        choice = compressed.choice
        if choice is None or step.most_entries <= choice.num_chosen:  # which is the same bits
            attended = self._attended_by_all(compressed, step)
        else:
            attended = self._attended_by_choice(compressed, choice, cache, step)
        return self._backend.paged_attention(call.query, cache.rows, attended, call.params)

    def _step(self, ratio: int) -> "_Step":
        if ratio not in self._steps:
            self._steps[ratio] = _Step(self._metadata, self._block_size, ratio)
        return self._steps[ratio]

    def _write_entries(self, compressed: CompressedCall, cache: CompressedCache, step: "_Step") -> None:
        raw = cache.raw.view(-1, cache.raw.shape[2])[step.raw_of_entries(compressed.num_pooled)]
        entries, keys = compressed.pool(raw, step.ended * step.ratio)
        self._backend.write_kv(entries[:, None], entries[:, None], cache.rows, step.rows_of_ended)
        if keys is not None:
            assert cache.index_keys is not None, "the layer has index keys"
            cache.index_keys.view(-1, cache.index_keys.shape[2])[step.numbers_of_ended] = keys

    def _attended_by_all(self, compressed: CompressedCall, step: "_Step") -> AttentionMetadata:
        """Returns what has each token attend to all entries that it sees; it is the same in all layers."""
        key = compressed.ratio, compressed.window
        if key not in self._attended:
            self._attended[key] = step.attended(compressed.window, step.entries, step.num_entries)
        return self._attended[key]

    def _attended_by_choice(
        self, compressed: CompressedCall, index: IndexCall, cache: CompressedCache, step: "_Step"
    ) -> AttentionMetadata:
        """Returns what has each token attend to the entries that it chooses."""
        assert cache.index_keys is not None, "the layer has index keys"
        keys = cache.index_keys.view(-1, 1, cache.index_keys.shape[2])
        num_at_once = max(1, _TABLE_NUMBERS // step.most_entries)
        tokens = torch.arange(len(step.positions))
        parts = [tokens[first : first + num_at_once] for first in range(0, len(tokens), num_at_once)]
        chosen = [
            self._backend.choose_slots(
                index._replace(query=index.query[part], weights=index.weights[part]), keys, step.index_metadata(part)
            )
            for part in parts
        ]
        num_seen = step.num_entries.clamp(max=index.num_chosen)
        return step.attended(compressed.window, step.rows_of_numbers(torch.cat(chosen).long()), num_seen)


class _Step:
    """Where the tokens of a step, and the entries of one ratio that they see or complete, lie in the cache.

    The rows of a block are those of its tokens, [0, block_size), and those of its entries behind them. Index keys have
    numbers: those of the entries alone, block by block.
    """

    def __init__(self, metadata: AttentionMetadata, block_size: int, ratio: int) -> None:
        self.ratio = ratio
        self._metadata, self._block_size = metadata, block_size
        self._num_in_block = -(-block_size // ratio)
        self._tables = metadata.block_tables.long()
        starts, ends = metadata.cu_seqlens_q.long(), metadata.context_lens.long()
        lengths, numbers = starts.diff(), torch.arange(int(starts[-1]))
        self._sequences = torch.arange(len(ends)).repeat_interleave(lengths)  # [num_tokens]
        self.positions = numbers + (ends - starts[1:])[self._sequences]  # [num_tokens]
        self.num_entries = (self.positions + 1) // ratio  # [num_tokens]: those that each token sees
        self.most_entries = metadata.max_context_len // ratio
        first = (ends - lengths) // ratio
        num_ended = ends // ratio - first
        self._ended_in = torch.arange(len(ends)).repeat_interleave(num_ended)  # [num_ended]: of which sequence
        before = num_ended.cumsum(0) - num_ended
        self.ended = torch.arange(len(self._ended_in)) + (first - before)[self._ended_in]  # [num_ended]: which entry

    @cached_property
    def rows_of_tokens(self) -> Tensor:  # [num_tokens]
        slots = self._metadata.slot_mapping
        return slots // self._block_size * self._num_rows + slots % self._block_size

    @cached_property
    def rows_of_ended(self) -> Tensor:  # [num_ended]
        return self.rows_of_numbers(self.numbers_of_ended)

    @cached_property
    def numbers_of_ended(self) -> Tensor:  # [num_ended]
        return self._numbers_of(self._ended_in, self.ended)

    @cached_property
    def entries(self) -> Tensor:
        """Rows [num_seqs, most entries] of the entries of each sequence."""
        return self.rows_of_numbers(self._index_numbers)

    def raw_of_entries(self, num_pooled: int) -> Tensor:
        """Returns the slots [num_ended, num_pooled] of the tokens that entries are made of, which complete now. Where
        there are no tokens before an entry's own, it is any slot."""
        last = self.ended[:, None] * self.ratio + self.ratio - 1
        positions = (last + torch.arange(1 - num_pooled, 1)).clamp(min=0)
        return self._blocks_of(self._ended_in[:, None], positions) * self._block_size + positions % self._block_size

    def rows_of_numbers(self, numbers: Tensor) -> Tensor:
        """Returns the rows of entries whose index keys have these numbers."""
        blocks, places = numbers // self._num_in_block, numbers % self._num_in_block
        return blocks * self._num_rows + self._block_size + places

    def index_metadata(self, tokens: Tensor) -> AttentionMetadata:
        """Returns what has each of these tokens see the index keys of its entries, in blocks of one each; it sees one
        if it has none."""
        sequences, num_seen = self._sequences[tokens], self.num_entries[tokens].clamp(min=1)
        return self._of_single_tokens(self._index_numbers[sequences], num_seen)

    def attended(self, window: int, entries: Tensor, num_entries: Tensor) -> AttentionMetadata:
        """Returns what has each token attend to its window, and then to the first `num_entries` [num_tokens] of the
        rows `entries`, which are each token's or each sequence's own."""
        num_in_window = (self.positions + 1).clamp(max=window)
        total = num_in_window + num_entries
        columns = torch.arange(int(total.max()))
        positions = (self.positions - num_in_window + 1)[:, None] + columns
        positions = positions.minimum(self.positions[:, None])
        rows = self._blocks_of(self._sequences[:, None], positions) * self._num_rows + positions % self._block_size
        if entries.shape[1]:
            places = (columns - num_in_window[:, None]).clamp(min=0, max=entries.shape[1] - 1)
            owners = torch.arange(len(entries)) if len(entries) == len(rows) else self._sequences
            rows = rows.where(columns < num_in_window[:, None], entries[owners[:, None], places])
        return self._of_single_tokens(rows, total)

    def _of_single_tokens(self, rows: Tensor, num_seen: Tensor) -> AttentionMetadata:
        """Returns what has each token see the first `num_seen` of its rows, in blocks of one row each."""
        return self._metadata.of_single_queries(rows, num_seen, rows.shape[1])

    @cached_property
    def _index_numbers(self) -> Tensor:
        """Numbers [num_seqs, most entries] of the entries of each sequence; any of those that it does not have."""
        entries = torch.arange(self.most_entries)
        return self._numbers_of(torch.arange(len(self._tables))[:, None], entries)

    def _numbers_of(self, sequences: Tensor, entries: Tensor) -> Tensor:
        last = entries * self.ratio + self.ratio - 1
        places = last % self._block_size // self.ratio
        return self._blocks_of(sequences, last) * self._num_in_block + places

    def _blocks_of(self, sequences: Tensor, positions: Tensor) -> Tensor:
        return self._tables[sequences, positions // self._block_size]

    @property
    def _num_rows(self) -> int:
        return self._block_size + self._num_in_block
