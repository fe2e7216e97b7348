"""Which running request has which slot of recurrent states; torch-free."""

__all__ = ["NoStateSlots", "StateSlots"]


class StateSlots:
    """Slots for the recurrent states of running requests, one each: free + held = all slots, always."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take(self) -> int | None:
        """Takes a free slot, of which there must be one. What it contains is that of the request before."""
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: int | None) -> None:
        """Gives back the slot of a request, None if it holds none."""
        if slot is not None:
            self._held.remove(slot)
            self._free.append(slot)


class NoStateSlots:
    """The slots of a model without recurrent states: requests need none."""

    has_free = True

    def take(self) -> int | None:
        return None

    def release(self, slot: int | None) -> None:
        assert slot is None
