"""A KV store in a dict, over KV and states of a `FakeRunner`: transfers end when a test says so, and fail when it says
so."""

from collections.abc import Sequence

from engine.core.batch import BlockTransfer, Direction, EndedTransfer, StateTransfer, Transfer
from engine.core.stats import KVStoreStats
from engine.core.stored_blocks import StoredBlocks
from tests.engine.fakes import FakeRunner

Content = list[tuple[int, ...]]
"""Of a block, the tokens up to each of its own; of states, those up to the last, alone in it."""


class FakeStore:
    """Checks that nothing else writes what is being stored, and that nothing finds what is being loaded."""

    def __init__(self, runner: FakeRunner, stored: dict[bytes, Content] | None = None) -> None:
        self._runner = runner
        self.stored: dict[bytes, Content] = {} if stored is None else stored
        self.under_way: list[Transfer] = []
        self.announced: set[bytes] = set()
        """What is taken as stored until it is read."""
        self.num_loads = 0
        """How many loads began."""
        self._contents: dict[Transfer, Content] = {}  # of what is being stored
        self._ended: list[EndedTransfer] = []
        self.is_held_up = False
        """Whether transfers end by `end` alone, not by waiting for them."""

    @property
    def blocks(self) -> StoredBlocks:
        return self

    @property
    def stats(self) -> KVStoreStats:
        return KVStoreStats()

    def num_stored(self, names: Sequence[bytes]) -> int:
        are_there = [name in self.stored or name in self.announced for name in names]
        return (*are_there, False).index(False)

    def announce(self, names: Sequence[bytes]) -> None:
        self.announced.update(names)

    def touch(self, names: Sequence[bytes]) -> None:
        pass

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            assert _place_of(transfer) not in map(_place_of, self.under_way)
            self.under_way.append(transfer)
            if transfer.direction is Direction.STORE:
                content = self._contents[transfer] = self._read(transfer)
                tokens = tuple(token for token in content[-1] if token >= 0)  # others tell the group of layers
                assert tokens[-len(transfer.token_ids) :] == transfer.token_ids
            else:
                self.num_loads += 1
                self._write(transfer, [(-2,)] * self._runner.block_size)

    def end(self, index: int = 0, succeeded: bool = True) -> None:
        """Ends a transfer under way."""
        transfer = self.under_way.pop(index)
        if transfer.direction is Direction.STORE:
            content = self._contents.pop(transfer)
            assert self._read(transfer) == content, "it was overwritten while it was stored"
            if succeeded:
                self.stored[transfer.name] = content
        elif content := self.stored.get(transfer.name, []) if succeeded else []:
            self._write(transfer, content)
            self.announced.discard(transfer.name)
        else:
            self.stored.pop(transfer.name, None)
            self.announced.discard(transfer.name)
            succeeded = False
        self._ended.append(EndedTransfer(transfer, succeeded, 0.0))

    def take_ended(self) -> list[EndedTransfer]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        while self.under_way and not self.is_held_up:
            self.end()

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.stored.pop(name, None)

    def clear(self) -> None:
        self.stored.clear()

    def close(self) -> None:
        pass

    def _read(self, transfer: Transfer) -> Content:
        if isinstance(transfer, StateTransfer):
            return [self._runner.states[transfer.slot]]
        return [self._runner.kv[transfer.block_id, offset] for offset in range(self._runner.block_size)]

    def _write(self, transfer: Transfer, content: Content) -> None:
        if isinstance(transfer, StateTransfer):
            self._runner.states[transfer.slot] = content[0]
        else:
            self._runner.kv |= {(transfer.block_id, offset): each for offset, each in enumerate(content)}


def _place_of(transfer: Transfer) -> tuple[bool, int]:
    """Returns what tells the transfer's block or slot from all others."""
    if isinstance(transfer, BlockTransfer):
        return True, transfer.block_id
    return False, transfer.slot
