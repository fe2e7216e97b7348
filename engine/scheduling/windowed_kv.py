"""A KV allocator for models whose layers see a window of the context: blocks that no later token sees there are given
back; torch-free.

A request has a block table for each group of layers (`engine.core.kv_groups`). In a windowed group, positions of a
running request are these half-open ranges, beside what `engine.scheduling.kv_allocator` says of the others:

    [0, h)   hidden      given back, though later requests may find them: h = block_size * request.num_hidden_blocks.
                         In their places stands the block behind them, since attention reads what it masks, too
    [h, c)   visible     the window of the next token, and the part of a block before it
    [c, e)   allocated   for what the next step computes: at most a chunk, e <= c + max_chunk

The first group's blocks of all tokens are taken at once, if it sees everything; those of windowed groups from chunk to
chunk, so that a long prompt needs no more than a window and a chunk. A prefix is found where the blocks of all of it
are cached in the first group, and those of the window before its end in the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from engine.core.kv_groups import KVGroups
from engine.core.request import Request
from engine.scheduling.kv_allocator import KVAllocator, PrefixMatch
from engine.scheduling.prefix_cache import BlockCache

__all__ = ["WindowedKVAllocator", "WindowedMatch"]


@dataclass(frozen=True, slots=True)
class WindowedMatch(PrefixMatch):
    """A match, whose `block_ids` are those of the first group, with any numbers for hidden blocks."""

    tables: tuple[tuple[int, ...], ...] = ()
    """The visible blocks of each group: all, if it sees everything."""
    num_hidden: int = 0
    """Number of hidden blocks of windowed groups."""


class WindowedKVAllocator(KVAllocator):
    """Gives each request a block table for each group, and takes the hidden blocks back."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: BlockCache,
        groups: KVGroups,
        max_chunk: int,
        max_retained: int = 0,
    ) -> None:
        """`max_chunk` is the most tokens of a request that a step computes."""
        super().__init__(num_blocks, block_size, cache, max_retained=max_retained)
        self._groups = groups
        self._max_chunk = max_chunk

    def match(self, request: Request) -> PrefixMatch:
        if not self._cache.can_match(request):
            return self._match_of(request, 0)
        most = (request.num_tokens - 1) // self._block_size
        if self._groups.num_full:
            most = len(self._cache.match(request, most))
        return self._with_copies(request, self._match_of(request, self._deepest(request, most)))

    def try_start(self, request: Request, match: PrefixMatch, spare: int) -> bool:
        assert isinstance(match, WindowedMatch)
        num_matched = len(match.block_ids)
        lengths = self._lengths(request.num_tokens, match.num_tokens(self._block_size))
        num_new = [length - num_matched for length in lengths]
        later = self._num_windowed_later(request, lengths[-1] - match.num_hidden)
        shared = list(chain.from_iterable(match.tables))
        taken = self._try_take(match, shared, sum(num_new), spare + later)
        if taken is None:
            return False
        kept, blocks = taken
        hidden = [0] * self._groups.num_full + [match.num_hidden] * self._groups.num_windowed
        tables = [[-1] * each + [*table] for each, table in zip(hidden, match.tables, strict=True)]
        _extend(tables, num_new, blocks[len(shared) :])
        request.block_table, *request.window_tables = tables
        self._hide_before(request, match.num_hidden)
        self._begin_behind(request, kept)
        return True

    def try_allocate(self, request: Request, num_drafts: int = 0, spare: int = 0) -> bool:
        tables = _tables_of(request)
        lengths = self._lengths(request.num_tokens + num_drafts, request.num_computed_tokens)
        lacking = [max(0, length - len(table)) for length, table in zip(lengths, tables, strict=True)]
        if not any(lacking):
            return True
        blocks = self._pool.try_allocate(sum(lacking), spare=spare)
        if blocks is not None:
            _extend(tables, lacking, blocks)
        return blocks is not None

    def surplus(self, request: Request) -> int:
        return min(map(len, _tables_of(request))) * self._block_size - request.num_tokens

    def computed(self, request: Request, start: int, end: int) -> None:
        super().computed(request, start, end)
        first, last = request.num_hidden_blocks, self._groups.first_visible_block(end, self._block_size)
        windowed = self._windowed_tables(request)
        last = min(last, len(windowed[0]) - 1)  # with a window of one token it may not be allocated yet
        if first < last:
            self._pool.release([table[index] for index in range(first, last) for table in windowed])
            self._hide_before(request, last)

    def trim(self, request: Request) -> None:
        super().trim(request)
        num_needed = self._num_blocks(request.num_tokens)
        for table in request.window_tables:
            self._pool.release(table[num_needed:])
            del table[num_needed:]

    def _release_blocks(self, request: Request) -> None:
        """Gives back the blocks so that later ones become least recently used before earlier ones, in all groups."""
        held = [[*enumerate(table)] for table in _tables_of(request)]
        for table in held[self._groups.num_full :]:
            del table[: request.num_hidden_blocks]
        self._pool.release([block for _, block in sorted(chain.from_iterable(held), key=lambda each: each[0])])
        request.window_tables, request.num_hidden_blocks = [], 0

    def _deepest(self, request: Request, most: int) -> int:
        """Returns the most blocks, up to `most`, before whose end all blocks that the next token sees are cached in the
        windowed groups."""
        end = index = most
        while index > self._groups.first_visible_block(end * self._block_size, self._block_size):
            index -= 1  # those from `index` to `end` are cached, but maybe for this one
            if any(self._cache.find(request, index, group) is None for group in self._windowed_numbers):
                end = index
        return end

    def _match_of(self, request: Request, num_blocks: int) -> WindowedMatch:
        """Returns the match of the request's first blocks, which are cached as far as they must be."""
        first = self._groups.first_visible_block(num_blocks * self._block_size, self._block_size)
        tables = [tuple(self._cache.match(request, num_blocks))] if self._groups.num_full else []
        for group in self._windowed_numbers:
            found = (self._cache.find(request, index, group) for index in range(first, num_blocks))
            tables.append(tuple(block for block in found if block is not None))
        block_ids = tables[0] if self._groups.num_full else (-1,) * first + tables[0]
        return WindowedMatch(block_ids, tables=tuple(tables), num_hidden=first)

    def _lengths(self, num_tokens: int, num_computed: int) -> list[int]:
        """Returns how long each group's table must be for the next step of a request of `num_tokens`."""
        windowed = self._num_blocks(min(num_tokens, num_computed + self._max_chunk))
        return [self._num_blocks(num_tokens)] * self._groups.num_full + [windowed] * self._groups.num_windowed

    def _num_windowed_later(self, request: Request, num_held: int) -> int:
        """Returns how many blocks more than at first, `num_held` of each windowed group, the request's prompt will take
        at the same time."""
        most = self._groups.most_windowed(request.num_tokens, self._block_size, self._max_chunk)
        return self._groups.num_windowed * max(0, most - num_held)

    @property
    def _windowed_numbers(self) -> range:
        return range(self._groups.num_full, self._groups.num_groups)

    def _windowed_tables(self, request: Request) -> Sequence[list[int]]:
        return _tables_of(request)[self._groups.num_full :]

    def _hide_before(self, request: Request, num_hidden: int) -> None:
        for table in self._windowed_tables(request):
            table[:num_hidden] = [table[num_hidden]] * num_hidden
        request.num_hidden_blocks = num_hidden


def _tables_of(request: Request) -> list[list[int]]:
    """Returns the tables of a request that has blocks, of each group."""
    return [request.block_table, *request.window_tables]


def _extend(tables: Sequence[list[int]], counts: Sequence[int], blocks: Sequence[int]) -> None:
    """Appends to each table so many of the blocks, which are as many as all together take."""
    source = iter(blocks)
    for table, count in zip(tables, counts, strict=True):
        table.extend(islice(source, count))
