"""The KV store that replicas share, and each one's copies to it and from it, in virtual time."""

from collections.abc import Sequence

from engine.core.batch import Direction, EndedTransfer, Transfer


class SharedStore:
    """Names of the blocks that are stored: as many as come, each known to all replicas from when it is whole."""

    def __init__(self) -> None:
        self._names: set[bytes] = set()

    def num_stored(self, names: Sequence[bytes]) -> int:
        return next((index for index, name in enumerate(names) if name not in self._names), len(names))

    def announce(self, names: Sequence[bytes]) -> None:
        """Adds nothing: what is stored is known."""

    def touch(self, names: Sequence[bytes]) -> None:
        """Changes nothing: nothing is ever removed."""

    def put(self, name: bytes) -> None:
        self._names.add(name)


class Copies:
    """The copies of one replica: those in one direction go one after the other, beside the steps."""

    def __init__(self, store: SharedStore, block_s: float) -> None:
        self._store = store
        self._block_s = block_s
        self._free_s = dict.fromkeys(Direction, 0.0)  # when what was begun in this direction has ended
        self._under_way: list[tuple[float, Transfer]] = []

    @property
    def next_end_s(self) -> float | None:
        """When the next copy ends; None if there is none."""
        return min((end_s for end_s, _ in self._under_way), default=None)

    def begin(self, transfers: Sequence[Transfer], now_s: float) -> None:
        for transfer in transfers:
            end_s = max(self._free_s[transfer.direction], now_s) + self._block_s
            self._free_s[transfer.direction] = end_s
            self._under_way.append((end_s, transfer))

    def take_ended(self, now_s: float) -> list[EndedTransfer]:
        """Returns the copies that have ended by now. What was stored can be found from now on."""
        if not self._under_way:
            return []
        ended = [transfer for end_s, transfer in self._under_way if end_s <= now_s]
        self._under_way = [each for each in self._under_way if each[0] > now_s]
        for transfer in ended:
            if transfer.direction is Direction.STORE:
                self._store.put(transfer.name)
        return [EndedTransfer(transfer, True, self._block_s) for transfer in ended]
