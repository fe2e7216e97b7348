"""Copies of recurrent states with a second tier, the KV store: each is written there once it is made, and read back
where no copy in memory reaches as deep; torch-free.

A slot is held meanwhile as requests hold it: it is *pinned* while it is written, and *pending* while it is read.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.core.batch import Direction, StateTransfer, name_of_states
from engine.core.request import Request
from engine.core.stored_blocks import StoredBlocks
from engine.scheduling.prefix_cache import BlockCache
from engine.scheduling.state_checkpoints import NoStateCheckpoints, StateCheckpoints

__all__ = ["NoTieredCheckpoints", "Reach", "TieredCheckpoints"]

_SHARE_STORING = 8  # at most one slot in so many is pinned for being written alone


class Reach(NamedTuple):
    """How much of a prefix may be gone on from."""

    num_blocks: int
    is_stored: bool = False
    """Whether the states after these blocks are in the KV store, and not in memory."""


class TieredCheckpoints(StateCheckpoints):
    """`StateCheckpoints` over memory and the KV store."""

    def __init__(self, slots: range, interval: int, block_size: int, cache: BlockCache, stored: StoredBlocks) -> None:
        super().__init__(slots, interval, block_size, cache)
        self._stored = stored
        self._made: dict[int, StateTransfer] = {}  # by the slot to which the step at hand copies
        self._to_store: dict[int, StateTransfer] = {}  # by slot, oldest first
        self._storing: set[bytes] = set()  # hashes of the blocks after which the states are that are being written
        self._max_storing = max(1, len(slots) // _SHARE_STORING)

    @property
    def has_stores(self) -> bool:
        """Whether states are being written, or to be."""
        return bool(self._to_store or self._storing)

    @property
    def can_load(self) -> bool:
        """Whether there is a slot into which states can be read."""
        return bool(self._free) or any(slot not in self._num_pins for slot in self._kept)

    def reach(self, request: Request, num_blocks: int, in_memory: bool = True) -> Reach:
        """Returns how many of the request's first `num_blocks` blocks have states after them in the KV store or, if
        `in_memory`, in memory."""
        longest = num_blocks * self._block_size // self._interval * self._interval
        for end in range(longest, 0, -self._interval):
            if (key := self._key(request, end)) is None:
                break
            if in_memory and key in self._slot_of:
                return Reach(end // self._block_size)
            if self._stored.num_stored([name_of_states(key)]):
                return Reach(end // self._block_size, is_stored=True)
        return Reach(0)

    def try_begin(self, request: Request, end: int) -> int | None:
        slot = super().try_begin(request, end)
        if slot is not None and not request.asked.steering.stays_in_memory:
            self._made[slot] = self._transfer(Direction.STORE, request, end // self._block_size, slot)
        return slot

    def keep(self, slot: int) -> None:
        super().keep(slot)
        if (transfer := self._made.pop(slot, None)) is not None:
            self._store(transfer)

    def cancel(self, slot: int) -> None:
        super().cancel(slot)
        self._made.pop(slot, None)

    def store_again(self, request: Request) -> None:
        """Has the states that the request goes on from written, unless they are stored."""
        if request.restored_slot is not None:
            num_blocks = request.num_computed_tokens // self._block_size
            self._store(self._transfer(Direction.STORE, request, num_blocks, request.restored_slot))

    def begin_load(self, request: Request, num_blocks: int) -> StateTransfer:
        """Takes a slot for the states after the request's first `num_blocks` blocks. Call only if `can_load`."""
        slot = self._try_take()
        assert slot is not None
        transfer = self._transfer(Direction.LOAD, request, num_blocks, slot)
        self._pending[slot] = transfer.block_hash
        return transfer

    def end_load(self, transfer: StateTransfer, succeeded: bool) -> None:
        """Takes the states as a copy, if they were read."""
        self.keep(transfer.slot) if succeeded else self.cancel(transfer.slot)

    def take_stores(self) -> list[StateTransfer]:
        """Returns the states to be written now, those of them that are still there."""
        stores = []
        while self._to_store and len(self._storing) < self._max_storing:
            transfer = self._to_store.pop(next(iter(self._to_store)))
            if self._slot_of.get(transfer.block_hash) == transfer.slot:
                self.pin(transfer.slot)
                self._storing.add(transfer.block_hash)
                stores.append(transfer)
        return stores

    def end_store(self, transfer: StateTransfer) -> None:
        self._storing.discard(transfer.block_hash)
        self.unpin(transfer.slot)

    def is_storing(self, block_hashes: Iterable[bytes]) -> bool:
        """Whether states after any of these blocks are being written, or to be."""
        queued = {
            each.block_hash for slot, each in self._to_store.items() if self._slot_of.get(each.block_hash) == slot
        }
        return any(block_hash in self._storing or block_hash in queued for block_hash in block_hashes)

    def names(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Returns what the KV store calls these first blocks of a text, and what the states on the grid after each."""
        step = self._interval // self._block_size
        return [
            name
            for number, block_hash in enumerate(block_hashes, 1)
            for name in ((block_hash,) if number % step else (block_hash, name_of_states(block_hash)))
        ]

    def all_names(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Returns what the KV store calls these blocks of any texts, and what the states after them, if it has some."""
        return [*block_hashes, *map(name_of_states, block_hashes)]

    def _store(self, transfer: StateTransfer) -> None:
        if transfer.block_hash not in self._storing and not self._stored.num_stored([transfer.name]):
            self._to_store.pop(transfer.slot, None)  # the newest goes last
            self._to_store[transfer.slot] = transfer

    def _transfer(self, direction: Direction, request: Request, num_blocks: int, slot: int) -> StateTransfer:
        end = num_blocks * self._block_size
        token_ids = tuple(request.token_ids(end - self._block_size, end))
        return StateTransfer(direction, slot, request.block_hashes[num_blocks - 1], token_ids)


class NoTieredCheckpoints(NoStateCheckpoints):
    """The checkpoints of a model without states: blocks are enough."""

    has_stores = False
    can_load = False

    def reach(self, _: Request, num_blocks: int, in_memory: bool = True) -> Reach:
        return Reach(num_blocks)

    def store_again(self, _: Request) -> None:
        """Writes nothing."""

    def begin_load(self, request: Request, num_blocks: int) -> StateTransfer:
        raise KeyError(num_blocks)

    def end_load(self, transfer: StateTransfer, succeeded: bool) -> None:
        raise KeyError(transfer.slot)

    def take_stores(self) -> list[StateTransfer]:
        return []

    def end_store(self, transfer: StateTransfer) -> None:
        raise KeyError(transfer.slot)

    def is_storing(self, block_hashes: Iterable[bytes]) -> bool:
        return False

    def names(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        return block_hashes

    def all_names(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        return block_hashes
