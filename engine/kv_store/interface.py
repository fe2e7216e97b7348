"""What the engine asks of a KV store; torch-free."""

from collections.abc import Sequence
from typing import Protocol

from engine.core.batch import EndedTransfer, Transfer
from engine.core.stats import KVStoreStats
from engine.core.stored_blocks import StoredBlocks


class KVStore(Protocol):
    """Runs transfers on threads of its own. Its methods return at once, but for `wait` and `close`."""

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begins transfers; each is returned by `take_ended` once, whatever comes of it."""

    def take_ended(self) -> list[EndedTransfer]:
        """Returns the transfers that ended since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Waits until there are transfers to take, `timeout_s` at most."""

    @property
    def blocks(self) -> StoredBlocks:
        """What is stored."""

    @property
    def stats(self) -> KVStoreStats: ...

    def remove(self, names: Sequence[bytes]) -> None:
        """Deletes these blocks and states, if they are stored or were given to `start` before. They are found no more,
        but loads that began before may succeed."""

    def clear(self) -> None:
        """Does the same with all that is known to be stored of this model."""

    def close(self) -> None:
        """Writes what was given to `start`, for a second at most."""


class _NoBlocks:
    def num_stored(self, names: Sequence[bytes]) -> int:
        return 0

    def announce(self, names: Sequence[bytes]) -> None:
        pass

    def touch(self, names: Sequence[bytes]) -> None:
        pass


class NullKVStore:
    """Stores nothing: the "off" state. It is never given a transfer."""

    def start(self, transfers: Sequence[Transfer]) -> None:
        assert not transfers

    def take_ended(self) -> list[EndedTransfer]:
        return []

    def wait(self, timeout_s: float) -> None:
        pass

    @property
    def blocks(self) -> StoredBlocks:
        return _NoBlocks()

    @property
    def stats(self) -> KVStoreStats:
        return KVStoreStats()

    def remove(self, names: Sequence[bytes]) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass
