"""Which blocks a request's tables need, one table for each group of layers (`engine.core.kv_groups`); torch-free.

In a group whose layers see a window of the context, positions of a running request are these half-open ranges, beside
what `engine.scheduling.kv_allocator` says of the others:

    [0, h)   hidden      given back, though later requests may find them: h = block_size * request.num_hidden_blocks.
                         In their places stands the block behind them, since attention reads what it masks, too
    [h, c)   visible     the window of the next token, and the part of a block before it
    [c, e)   allocated   for what the next step computes: at most a chunk, e <= c + max_chunk

The first group's blocks of all tokens are taken at once, if it sees everything; those of windowed groups from chunk to
chunk, so that a long prompt needs no more than a window and a chunk. To go on behind a prefix, a request needs all of
its blocks in the first group, and those of the window before its end in the others.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, product

from engine.core.kv_groups import ONE_GROUP, KVGroups
from engine.core.request import Request
from engine.scheduling.prefix_cache import PrefixMatch

__all__ = ["BlockTables", "Place", "tables_of"]

Place = tuple[int, int]
"""The number of a block in a text, and the group of layers whose KV it holds."""


class BlockTables:
    """Lays out the block tables of requests. It has nothing but sizes: blocks come from and go to its caller."""

    def __init__(self, block_size: int, groups: KVGroups = ONE_GROUP, max_chunk: int = 0) -> None:
        """`max_chunk` is the most tokens of a request that a step computes; it counts for windowed groups alone."""
        self._block_size = block_size
        self._groups = groups
        self._max_chunk = max_chunk
        self.has_full_group = groups.num_full > 0
        """Whether layers of the first group see everything."""
        self.windowed = range(groups.num_full, groups.num_groups)
        """Numbers of the groups whose layers see a window."""

    def num_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks so many tokens take in a group that sees everything."""
        return -(-num_tokens // self._block_size)

    def surplus(self, request: Request) -> int:
        """Returns how many tokens a running request's blocks have places for, beside all its own ones."""
        shortest = request.window_tables[0] if request.window_tables else request.block_table
        return len(shortest) * self._block_size - request.num_tokens

    def lacking(self, request: Request, num_tokens: int) -> list[int]:
        """Returns how many blocks each table of a running request of `num_tokens` still needs for its next step."""
        lengths = self._lengths(num_tokens, request.num_computed_tokens)
        return [max(0, length - len(table)) for length, table in zip(lengths, tables_of(request), strict=True)]

    def extend(self, request: Request, counts: Sequence[int], blocks: Sequence[int]) -> None:
        """Appends to each table so many of the blocks, which are as many as all together take."""
        source = iter(blocks)
        for table, count in zip(tables_of(request), counts, strict=True):
            table.extend(islice(source, count))

    def to_begin(self, request: Request, match: PrefixMatch) -> tuple[list[int], int]:
        """Returns how many new blocks each table needs for the first step behind a match, and how many more all need
        at the same time, at most, while the rest of the request's tokens is computed."""
        lengths = self._lengths(request.num_tokens, match.num_tokens(self._block_size))
        most = self._groups.most_windowed(request.num_tokens, self._block_size, self._max_chunk)
        num_held = lengths[-1] - self._first_visible(match.num_blocks)
        later = self._groups.num_windowed * max(0, most - num_held)
        return [length - match.num_blocks for length in lengths], later

    def begin(self, request: Request, match: PrefixMatch, counts: Sequence[int], blocks: Sequence[int]) -> None:
        """Gives a request without blocks those of the match, and so many new ones of each group."""
        first = self._first_visible(match.num_blocks)
        hidden = [0] * self._groups.num_full + [first] * self._groups.num_windowed
        found = match.tables or ((),) * self._groups.num_groups
        request.block_table, *request.window_tables = (
            [*[-1] * each, *table] for each, table in zip(hidden, found, strict=True)
        )
        self.extend(request, counts, blocks)
        self._hide_before(request, first)

    def hide(self, request: Request) -> list[int]:
        """Returns the blocks that are to be given back because no token behind those computed sees them any more."""
        if not self.windowed:
            return []
        windowed = tables_of(request)[self._groups.num_full :]
        first, last = request.num_hidden_blocks, self._first_seen_after(request.num_computed_tokens)
        last = min(last, len(windowed[0]) - 1)  # with a window of one token it may not be allocated yet
        if first >= last:
            return []
        hidden = [table[index] for index in range(first, last) for table in windowed]
        self._hide_before(request, last)
        return hidden

    def cut(self, request: Request) -> list[int]:
        """Returns the blocks behind the request's own tokens, which are to be given back."""
        num_needed = self.num_blocks(request.num_tokens)
        if num_needed >= len(request.block_table):  # than which no other table is longer
            return []
        given_back: list[int] = []
        for table in tables_of(request):
            given_back += table[num_needed:]
            del table[num_needed:]
        return given_back

    def take_all(self, request: Request) -> list[int]:
        """Returns all blocks, which are to be given back, in the order of their places in the text."""
        held = self.held(request)
        request.block_table, request.window_tables, request.num_hidden_blocks = [], [], 0
        return held

    def held(self, request: Request) -> list[int]:
        """Returns the blocks that the request has, in the order of their places in the text."""
        if not self.windowed:
            return request.block_table
        tables = [[*enumerate(table)] for table in tables_of(request)]
        for table in tables[self._groups.num_full :]:
            del table[: request.num_hidden_blocks]
        return [block for _, block in sorted(chain.from_iterable(tables), key=lambda each: each[0])]

    # Behind a prefix.

    def deepest(self, most: int, is_there: Callable[[int, int], bool]) -> int:
        """Returns the most blocks, up to `most`, before whose end all places that the next token sees in the windowed
        groups are there."""
        end = index = most
        while self.windowed and index > self._first_visible(end):
            index -= 1  # those from `index` to `end` are there, but maybe for this one
            if not all(is_there(index, group) for group in self.windowed):
                end = index
        return end

    def visible(self, num_blocks: int) -> range:
        """Returns which of a text's first `num_blocks` blocks the next token sees in the windowed groups."""
        return range(self._first_visible(num_blocks), num_blocks)

    def windowed_places(self, num_blocks: int) -> Iterator[Place]:
        """Yields the places of windowed groups that a request needs to go on behind its first `num_blocks` blocks."""
        return product(self.visible(num_blocks), self.windowed)

    def places(self, num_blocks: int) -> Iterator[Place]:
        """Yields all places that a request needs to go on behind its first `num_blocks` blocks."""
        first_group = ((index, 0) for index in range(num_blocks if self.has_full_group else 0))
        return chain(first_group, self.windowed_places(num_blocks))

    def _lengths(self, num_tokens: int, num_computed: int) -> list[int]:
        """Returns how long each group's table must be for the next step of a request of `num_tokens`."""
        windowed = self.num_blocks(min(num_tokens, num_computed + self._max_chunk))
        return [self.num_blocks(num_tokens)] * self._groups.num_full + [windowed] * self._groups.num_windowed

    def _first_visible(self, num_blocks: int) -> int:
        return self._first_seen_after(num_blocks * self._block_size)

    def _first_seen_after(self, num_tokens: int) -> int:
        return self._groups.first_visible_block(num_tokens, self._block_size)

    def _hide_before(self, request: Request, num_hidden: int) -> None:
        for table in tables_of(request)[self._groups.num_full :]:
            table[:num_hidden] = [table[num_hidden]] * num_hidden
        request.num_hidden_blocks = num_hidden


def tables_of(request: Request) -> list[list[int]]:
    """Returns the tables of a request that has blocks, of each group."""
    return [request.block_table, *request.window_tables]
