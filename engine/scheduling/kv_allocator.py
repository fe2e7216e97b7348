"""The KV blocks and state slots of requests: every change of a block table happens here; torch-free.

Positions of a running request, from 0 on, as half-open ranges that follow one another:

    [0, c)   computed    KV exists; c = request.num_computed_tokens. A prefix of these may be shared with others.
    [c, n)   allocated   for the tokens that the request has, n = request.num_tokens, and that a step will compute
    [n, t)   surplus     for draft tokens of the step at hand; t = block_size * len(request.block_table)

A request without blocks has computed nothing. Where layers see a window of the context, blocks of computed positions
are given back, and others are taken from chunk to chunk (`engine.scheduling.block_tables`). Where the tokens behind the
blocks that a request shares are the first of yet another cached block, its first step copies that one to its own; until
then both are held for it. Where the model has recurrent states, a running request also holds a slot for them, which has
the states after position c - 1. The scheduler says when blocks are wanted; it never edits a table.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from engine.core.batch import EndedTransfer, Transfer
from engine.core.cache_steering import CachedPrefixes
from engine.core.request import Request
from engine.core.stats import PoolStats
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tables import BlockTables, tables_of
from engine.scheduling.draft_kv import DraftKV, NoDraftKV
from engine.scheduling.prefix_cache import BlockCache, PrefixMatch
from engine.scheduling.prefix_matcher import PrefixMatcher
from engine.scheduling.prefix_steering import NoPrefixSteering, PrefixSteering
from engine.scheduling.state_checkpoints import NoStateCheckpoints, StateCheckpoints
from engine.scheduling.state_slots import NoStateSlots, StateSlots

__all__ = ["KVAllocator", "PrefixCounts", "PrefixMatch"]


class PrefixCounts(NamedTuple):
    """Tokens at the beginning of a request that need not be computed."""

    num_cached_tokens: int
    """Tokens whose blocks are in memory or in the KV store."""
    num_stored_tokens: int
    """Tokens whose blocks are in the KV store."""


class KVAllocator:
    """Gives blocks and slots to requests, finds cached prefixes, and takes everything back by one door, `free`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: BlockCache,
        slots: StateSlots | NoStateSlots | None = None,
        checkpoints: StateCheckpoints | NoStateCheckpoints | None = None,
        draft_kv: DraftKV | None = None,
        max_retained: int = 0,
        tables: BlockTables | None = None,
        steering: PrefixSteering | NoPrefixSteering | None = None,
    ) -> None:
        """Hands out `num_blocks` blocks of `block_size` tokens each, of which `max_retained` may be retained, and
        `slots` and `checkpoints`, if the model has states; `draft_kv` knows in which blocks the draft model's keys and
        values are, if it has any of its own; `tables` lays out block tables, if a request has several; `steering`
        answers for what tenants' keys are used with, unless nobody asks."""
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks, cache, max_retained)
        self._cache = cache
        self._steering = steering or PrefixSteering(self._pool, cache, block_size)
        self._now_s = 0.0
        self._slots = slots or NoStateSlots()
        self._checkpoints = checkpoints or NoStateCheckpoints()
        self._draft_kv = draft_kv or NoDraftKV()
        self._tables = tables or BlockTables(block_size)
        self._matcher = PrefixMatcher(block_size, cache, self._checkpoints, self._tables)
        self._block_size = block_size
        self.prefix_queries = 0
        """Tokens that were looked up in the prefix cache, by requests that then got their blocks for the first time."""
        self.prefix_hits = 0
        """Tokens of `prefix_queries` that were found."""
        self.prefix_disk_hits = 0
        """Tokens of `prefix_hits` that were read from the KV store."""
        self.prefix_disk_declined = 0
        """Tokens that the KV store has and that were computed, because that was predicted to be faster."""

    @property
    def stats(self) -> PoolStats:
        return self._pool.stats

    def begin_step(self, now_s: float) -> None:
        """Tells the time of the step at hand, which ends what is retained for less long."""
        self._now_s = now_s
        self._pool.expire(now_s)

    def match(self, request: Request) -> PrefixMatch:
        """Returns the longest cached prefix of the request's tokens that leaves at least one to compute, and after
        which the states are known, if the model has states."""
        return self._matcher.match(request)

    def try_start(self, request: Request, match: PrefixMatch, spare: int) -> bool:
        """Gives a request that has no blocks those of its prefix and new ones for its other tokens, and a slot.

        Returns False, and changes nothing, if no slot is free or fewer than `spare` available blocks would be left.
        Where blocks to copy from would be among these, it does without.
        """
        if not self._slots.has_free:
            return False
        num_new, num_later = self._tables.to_begin(request, match)
        taken = self._try_take(match, sum(num_new), spare + num_later)
        if taken is None:
            return False
        match, blocks = taken
        self._tables.begin(request, match, num_new, blocks)
        request.state_slot = self._slots.take()
        if match.state_slot is not None:
            request.restored_slot = match.state_slot
            self._checkpoints.pin(match.state_slot)
        self._draft_kv.start(request, match.num_blocks)
        self._begin_behind(request, match)
        return True

    def try_allocate(self, request: Request, num_drafts: int = 0, spare: int = 0) -> bool:
        """Gives a running request the blocks that its tokens and `num_drafts` draft tokens still lack.

        Returns False, and changes nothing, if fewer than `spare` available blocks would be left.
        """
        if num_drafts <= self._tables.surplus(request):
            return True
        num_lacking = self._tables.lacking(request, request.num_tokens + num_drafts)
        blocks = self._pool.try_allocate(sum(num_lacking), spare=spare)
        if blocks is None:
            return False
        self._tables.extend(request, num_lacking, blocks)
        self._draft_kv.allocated(blocks)
        return True

    def checkpoint(self, request: Request, end: int) -> int | None:
        """Returns the slot to which the step at hand is to copy the request's states after position `end` - 1; None if
        they are not to be kept. `computed` or `free` must follow before the next step."""
        request.saved_slot = self._checkpoints.try_begin(request, end)
        return request.saved_slot

    def max_drafts(self, request: Request) -> int:
        """Returns how many draft tokens the step at hand may verify, if there are blocks for them."""
        return self._checkpoints.max_drafts(request.num_tokens)

    def surplus(self, request: Request) -> int:
        """Returns how many draft tokens the request's blocks have places for, beside all its own tokens."""
        return self._tables.surplus(request)

    def computed(self, request: Request, start: int, end: int) -> None:
        """Records that a step computed positions [start, end) from the request's own tokens: later requests may find
        the blocks that became full. KV of rejected draft tokens, at `end` and after it, counts as not computed."""
        request.num_computed_tokens = end
        if request.saved_slot is not None:
            self._checkpoints.keep(request.saved_slot)
            request.saved_slot = None
        self._unpin(request)
        for index, group in self._cache.insert(request, start // self._block_size, end // self._block_size):
            self._on_new_block(request, index, group)
        if hidden := self._tables.hide(request):
            self._pool.release(hidden)

    def draft_span(self, request: Request, num_tokens: int) -> tuple[int, int] | None:
        """Returns the positions that the draft model computes in a step that computes the request's next `num_tokens`;
        None if none."""
        return self._draft_kv.span(request, num_tokens)

    def drafted(self, request: Request, own_end: int, end: int) -> None:
        """Records that the draft model computed the request's own tokens before `own_end`, and draft tokens, of which
        those before `end` were accepted."""
        self._draft_kv.computed(request, own_end, end)

    def trim(self, request: Request) -> None:
        """Frees the surplus: blocks that only rejected draft tokens needed."""
        if unneeded := self._tables.cut(request):
            self._pool.release(unneeded)

    def free(self, request: Request) -> None:
        """Takes back all that the request holds, because it ends or is preempted; what is cached can be found again."""
        self._steering.used(request, self._now_s)
        self._pool.release(self._tables.take_all(request))
        self._slots.release(request.state_slot)
        if request.saved_slot is not None:
            self._checkpoints.cancel(request.saved_slot)
            request.saved_slot = None
        self._unpin(request)
        request.state_slot = None
        request.num_computed_tokens = request.num_drafted_tokens = 0

    def _try_take(self, match: PrefixMatch, num_new: int, spare: int) -> tuple[PrefixMatch, list[int]] | None:
        """Takes the blocks of a match, new ones, and a reference on those to copy from, if there is room for these,
        too. Returns what is left of the match, and the new blocks; None, and changes nothing, if there is no room."""
        shared = [*chain.from_iterable(match.tables)]
        for each in (match, replace(match, copied_blocks=(), num_copied_tokens=0)):
            held = [*each.copied_blocks, *shared]
            blocks = self._pool.try_allocate(num_new, held, spare)
            if blocks is not None:
                return each, blocks[len(held) :]
        return None

    def _begin_behind(self, request: Request, match: PrefixMatch) -> None:
        """Notes that the request begins behind its cached prefix."""
        own = (table[match.num_blocks] for table in tables_of(request))
        request.block_copies = tuple(zip(match.copied_blocks, own, strict=False))
        request.num_computed_tokens = match.num_tokens(self._block_size)
        if request.first_scheduled_s is None:
            self.prefix_queries += request.num_tokens if self._cache.can_match(request) else 0
            self.prefix_hits += request.num_computed_tokens

    def reset(self) -> None:
        """Forgets the prefixes of all that was computed so far; requests keep the blocks they hold."""
        self._pool.clear_cache()
        self._checkpoints.clear()

    def cached_prefixes(self, tenant: str, now_s: float) -> list[CachedPrefixes]:
        """Returns what is cached of the tenant's ended requests, by key."""
        return self._steering.cached(tenant, now_s, self._count_stored)

    def drop_prefixes(self, tenant: str, key: str | None) -> list[bytes]:
        """Forgets what is cached under the tenant's key, or under all its keys, and under no other; requests keep the
        blocks they hold. Returns the names of what of it may be in the KV store."""
        dropped = self._steering.drop(tenant, key)
        self._checkpoints.drop(dropped)
        return dropped

    # A KV store beside memory: `engine.scheduling.kv_tiers` has one, this allocator has none.

    @property
    def has_transfers(self) -> bool:
        """Whether transfers are under way, or to be handed out."""
        return False

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Returns the transfers to begin now."""
        return ()

    def end_transfers(self, ended: Sequence[EndedTransfer]) -> None:
        """Takes back what transfers that ended held; what was loaded can be found."""

    def try_load(self, request: Request, spare: int, now_s: float) -> bool:
        """Begins to read more of the request's prefix than `match` finds, where that is there and pays. Returns False,
        and changes nothing, if not, or if fewer than `spare` available blocks would be left."""
        return False

    def is_loading(self, request: Request, now_s: float) -> bool:
        """Whether the request should go on waiting for what `try_load` began."""
        return False

    def found(self, request: Request) -> PrefixCounts:
        """Returns how much of the prefix of a request that has no blocks is there."""
        return PrefixCounts(self.match(request).num_blocks * self._block_size, 0)

    def num_stored_tokens(self, request: Request) -> int | None:
        """Returns how many of the first tokens of a request that ended the KV store has; None while it is writing any
        of its blocks."""
        return 0

    def _count_stored(self, block_hashes: Sequence[bytes]) -> int:
        """Returns how many of these blocks are in the KV store."""
        return 0

    def _on_new_block(self, request: Request, index: int, group: int) -> None:
        """Called for each of a request's blocks that became full, if no other block of the group holds the same
        tokens."""

    def _unpin(self, request: Request) -> None:
        """Gives up what the request copied to go on from, or would have."""
        if request.block_copies:
            self._pool.release([source for source, _ in request.block_copies])
            request.block_copies = ()
        if request.restored_slot is not None:
            self._checkpoints.unpin(request.restored_slot)
            request.restored_slot = None
