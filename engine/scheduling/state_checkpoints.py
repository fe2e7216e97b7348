"""Copies of the recurrent states after the beginnings of texts, for later requests to go on from; torch-free."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from engine.core.config import MAX_SPECULATIVE_TOKENS
from engine.core.request import Request
from engine.scheduling.prefix_cache import BlockCache

__all__ = ["NoStateCheckpoints", "StateCheckpoints"]


class StateCheckpoints:
    """Slots with copies of states, each made after a multiple of `interval` tokens and found by the hash of these.

    A slot is *free*, or *pending* while the step at hand makes its copy, or *kept*, and the least recently used one of
    those is overwritten; but not while it is *pinned*, because a request has still to go on from it.
    free + pending + kept = all slots, always.
    """

    def __init__(self, slots: range, interval: int, block_size: int, cache: BlockCache) -> None:
        """`interval` is a multiple of `block_size`; `cache` knows the hashes of tokens."""
        assert interval % block_size == 0
        self._free = [*reversed(slots)]
        self._pending: dict[int, bytes] = {}
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # least recently used first
        self._slot_of: dict[bytes, int] = {}  # of those kept
        self._num_pins: Counter[int] = Counter()
        self._interval = interval
        self._block_size = block_size
        self._cache = cache

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_pinned(self) -> int:
        return len(self._num_pins)

    def deepest(self, request: Request, num_blocks: int) -> tuple[int, int | None]:
        """Returns how many of the request's first `num_blocks` blocks have a copy of the states after them, and its
        slot; (0, None) if none has."""
        longest = num_blocks * self._block_size // self._interval * self._interval
        for end in range(longest, 0, -self._interval):
            key = self._key(request, end)
            if key is not None and (slot := self._slot_of.get(key)) is not None:
                return end // self._block_size, slot
        return 0, None

    def pin(self, slot: int) -> None:
        """Keeps the copy from being overwritten until it is unpinned as often."""
        self._num_pins[slot] += 1
        self._kept.move_to_end(slot)

    def unpin(self, slot: int) -> None:
        self._num_pins[slot] -= 1
        if not self._num_pins[slot]:
            del self._num_pins[slot]

    def max_drafts(self, num_tokens: int) -> int:
        """Returns how many draft tokens a step may verify behind so many tokens. Drafts end before the next multiple of
        the interval: the step that ends there copies its states, and must know all tokens that these have seen."""
        return max(-num_tokens % self._interval - 1, 0)

    def try_begin(self, request: Request, end: int) -> int | None:
        """Returns the slot for a copy of the states after the request's first `end` tokens, which a step is about to
        compute; None if there should be none, or is one."""
        if end % self._interval or (key := self._key(request, end)) is None:
            return None
        if key in self._slot_of:
            self._kept.move_to_end(self._slot_of[key])
            return None
        slot = None if key in self._pending.values() else self._try_take()
        if slot is not None:
            self._pending[slot] = key
        return slot

    def keep(self, slot: int) -> None:
        """Records that the pending copy was made."""
        key = self._pending.pop(slot)
        self._kept[slot], self._slot_of[key] = key, slot

    def cancel(self, slot: int) -> None:
        """Records that the pending copy may not have been made."""
        del self._pending[slot]
        self._free.append(slot)

    def drop(self, block_hashes: Sequence[bytes]) -> None:
        """Forgets the copies of the states after these blocks. Requests that have still to go on from one find it
        there."""
        for block_hash in block_hashes:
            self._slot_of.pop(block_hash, None)

    def clear(self) -> None:
        """Forgets all copies. Requests that have still to go on from one find it there."""
        self._slot_of.clear()

    def _try_take(self) -> int | None:
        if self._free:
            return self._free.pop()
        slot = next((each for each in self._kept if each not in self._num_pins), None)
        if slot is not None:
            self._forget(self._kept.pop(slot), slot)
        return slot

    def _forget(self, key: bytes, slot: int) -> None:
        if self._slot_of.get(key) == slot:  # not since `clear`
            del self._slot_of[key]

    def _key(self, request: Request, end: int) -> bytes | None:
        """Returns the hash of the request's first `end` tokens; None where nothing is cached."""
        return self._cache.prefix_hash(request, end // self._block_size)


class NoStateCheckpoints:
    """The checkpoints of a model without states: cached blocks are enough, and nothing is copied."""

    def deepest(self, _: Request, num_blocks: int) -> tuple[int, int | None]:
        return num_blocks, None

    def pin(self, slot: int) -> None:
        raise KeyError(slot)

    def unpin(self, slot: int) -> None:
        raise KeyError(slot)

    def max_drafts(self, num_tokens: int) -> int:
        return MAX_SPECULATIVE_TOKENS

    def try_begin(self, _: Request, end: int) -> int | None:
        return None

    def keep(self, slot: int) -> None:
        raise KeyError(slot)

    def cancel(self, slot: int) -> None:
        raise KeyError(slot)

    def drop(self, block_hashes: Sequence[bytes]) -> None:
        """Forgets nothing."""

    def clear(self) -> None:
        """Forgets nothing."""
