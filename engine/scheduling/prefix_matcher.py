"""How much of the beginning of a request is cached, in all groups of layers, with the states after it; torch-free."""

from collections.abc import Sequence
from functools import partial

from engine.core.request import Request
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.prefix_cache import BlockCache, PrefixMatch
from engine.scheduling.state_checkpoints import NoStateCheckpoints, StateCheckpoints


class PrefixMatcher:
    """Finds cached prefixes. It leaves the cache and its blocks as they are."""

    def __init__(
        self,
        block_size: int,
        cache: BlockCache,
        checkpoints: StateCheckpoints | NoStateCheckpoints,
        tables: BlockTables,
    ) -> None:
        self._block_size = block_size
        self._cache = cache
        self._checkpoints = checkpoints
        self._tables = tables

    def match(self, request: Request) -> PrefixMatch:
        """Returns the longest cached prefix of the request's tokens that leaves at least one to compute, and after
        which the states are known, if the model has states; with the blocks that the request may copy behind it."""
        if not self._cache.can_match(request):
            return PrefixMatch()
        full = self.full_blocks(request)
        num_blocks, state_slot = self.usable(request, full)
        tables = self._found_tables(request, num_blocks, full) if num_blocks else ()
        copied_blocks, num_copied_tokens = self._cache.match_partly(request, num_blocks)
        return PrefixMatch(num_blocks, tables, state_slot, copied_blocks, num_copied_tokens)

    def num_readable(self, request: Request) -> int:
        """Returns how many blocks the request may share: its last token is always computed."""
        return (request.num_tokens - 1) // self._block_size

    def full_blocks(self, request: Request) -> list[int]:
        """Returns the first blocks of the request that are cached in the group that sees everything; none without such
        a group."""
        return self._cache.match(request, self.num_readable(request)) if self._tables.has_full_group else []

    def usable(self, request: Request, full: Sequence[int]) -> tuple[int, int | None]:
        """Returns behind how many of its blocks, of which `full` are those of `full_blocks`, the request may go on, and
        the slot of the states there."""
        most = len(full) if self._tables.has_full_group else self.num_readable(request)
        return self._checkpoints.deepest(request, self._tables.deepest(most, partial(self.is_cached, request)))

    def is_cached(self, request: Request, index: int, group: int) -> bool:
        """Whether a block of the request's is cached in a group of layers."""
        return self._cache.find(request, index, group) is not None

    def _found_tables(self, request: Request, num_blocks: int, full: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns the blocks of each group that the request needs behind its first `num_blocks`, which are cached."""
        tables = [tuple(full[:num_blocks])] if self._tables.has_full_group else []
        for group in self._tables.windowed:
            found = (self._cache.find(request, index, group) for index in self._tables.visible(num_blocks))
            tables.append(tuple(block for block in found if block is not None))
        return tuple(tables)
