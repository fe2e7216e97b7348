"""How much of the beginning of a request is in memory or in the KV store, and what of it is to be read; torch-free."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from engine.core.batch import name_of_states
from engine.core.request import Request
from engine.core.stored_blocks import StoredBlocks
from engine.scheduling.block_tables import BlockTables, Place
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.prefix_matcher import PrefixMatcher
from engine.scheduling.state_tiers import NoTieredCheckpoints, TieredCheckpoints

__all__ = ["Reading", "TieredPrefixes"]


class Reading(NamedTuple):
    """What is to be read of a prefix, so that a request may go on from it."""

    num_blocks: int
    in_memory: list[int]
    """Blocks of the prefix that are in memory."""
    missing: list[Place]
    """The places of its other blocks, which the KV store has."""
    reads_states: bool
    """Whether the states after it are read, too."""
    num_usable: int
    """Blocks from which the request may go on without reading anything."""

    @property
    def num_gained(self) -> int:
        return self.num_blocks - self.num_usable


class TieredPrefixes:
    """Looks for prefixes in both tiers, and knows what the KV store calls their blocks. It leaves both as they are."""

    def __init__(
        self,
        matcher: PrefixMatcher,
        cache: PrefixCache,
        states: TieredCheckpoints | NoTieredCheckpoints,
        tables: BlockTables,
        stored: StoredBlocks,
    ) -> None:
        self._matcher = matcher
        self._cache = cache
        self._states = states
        self._tables = tables
        self._stored = stored

    def readable_hashes(self, request: Request) -> Sequence[bytes]:
        """Returns the hashes of the blocks that may be read for the request."""
        return self._cache.hashes(request, self._matcher.num_readable(request))

    def reading(self, request: Request) -> Reading:
        """Returns what is to be read so that the request goes on from as deep as both tiers allow."""
        hashes, full = self.readable_hashes(request), self._matcher.full_blocks(request)
        num_there = len(full) + self._num_stored_first(hashes[len(full) :])
        num_there = self._tables.deepest(num_there, partial(self._is_there, request))
        num_blocks, reads_states = self._states.reach(request, num_there)
        in_memory, missing = self._split(request, num_blocks, full)
        return Reading(num_blocks, in_memory, missing, reads_states, self._matcher.usable(request, full)[0])

    def first_name(self, request: Request, reading: Reading) -> bytes:
        """Returns what the KV store calls the first that is to be read, of which there is some."""
        if reading.missing:
            return self._cache.key(request, *reading.missing[0])
        return name_of_states(request.block_hashes[reading.num_blocks - 1])

    def num_stored(self, request: Request, hashes: Sequence[bytes]) -> int:
        """Returns behind how many of the request's first blocks, which have these hashes, the KV store alone suffices
        to go on."""
        num_blocks = self._tables.deepest(self._num_stored_first(hashes), partial(self._is_stored, request))
        return self._states.reach(request, num_blocks, in_memory=False).num_blocks

    def names(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Returns what the KV store calls these first blocks of a text, and the states after them."""
        return self.in_all_groups(self._states.names(block_hashes))

    def in_all_groups(self, names: Sequence[bytes]) -> list[bytes]:
        """Returns what it calls the same in all groups of layers, where these are the names in the first."""
        return [key for name in names for key in self._cache.keys(name)]

    def _num_stored_first(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of these blocks the KV store has, without a gap, in the group that sees everything."""
        return self._stored.num_stored(hashes) if self._tables.has_full_group else len(hashes)

    def _split(self, request: Request, num_blocks: int, full: list[int]) -> tuple[list[int], list[Place]]:
        """Returns which of the blocks that the request needs behind its first `num_blocks` are in memory, `full` in the
        group that sees everything, and the places of the others."""
        in_memory, missing = full[:num_blocks], list[Place]()
        if self._tables.has_full_group:
            missing += [(index, 0) for index in range(len(full), num_blocks)]
        for index, group in self._tables.windowed_places(num_blocks):
            if (block_id := self._cache.find(request, index, group)) is None:
                missing.append((index, group))
            else:
                in_memory.append(block_id)
        return in_memory, missing

    def _is_there(self, request: Request, index: int, group: int) -> bool:
        return self._matcher.is_cached(request, index, group) or self._is_stored(request, index, group)

    def _is_stored(self, request: Request, index: int, group: int) -> bool:
        return self._stored.num_stored([self._cache.key(request, index, group)]) > 0
