"""A KV store in a dict, over the KV of a `FakeRunner`: transfers end when a test says so, and fail when it says so."""

from collections.abc import Sequence

from engine.core.batch import BlockTransfer, Direction, EndedTransfer
from engine.core.stats import KVStoreStats
from engine.core.stored_blocks import StoredBlocks
from tests.engine.fakes import FakeRunner

Content = list[tuple[int, ...]]


class FakeStore:
    """Checks that nothing else writes a block while it is stored, and that nothing finds one while it is loaded."""

    def __init__(self, runner: FakeRunner, stored: dict[bytes, Content] | None = None) -> None:
        self._runner = runner
        self.stored: dict[bytes, Content] = {} if stored is None else stored
        self.under_way: list[BlockTransfer] = []
        self.announced: set[bytes] = set()
        """Blocks that are taken as stored until they are read."""
        self._contents: dict[int, Content] = {}  # of blocks that are being stored, by block
        self._ended: list[EndedTransfer] = []
        self.is_held_up = False
        """Whether transfers end by `end` alone, not by waiting for them."""

    @property
    def blocks(self) -> StoredBlocks:
        return self

    @property
    def stats(self) -> KVStoreStats:
        return KVStoreStats()

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        are_there = [block_hash in self.stored or block_hash in self.announced for block_hash in block_hashes]
        return (*are_there, False).index(False)

    def announce(self, block_hashes: Sequence[bytes]) -> None:
        self.announced.update(block_hashes)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        pass

    def start(self, transfers: Sequence[BlockTransfer]) -> None:
        for transfer in transfers:
            assert transfer.block_id not in (each.block_id for each in self.under_way)
            self.under_way.append(transfer)
            if transfer.direction is Direction.STORE:
                content = self._contents[transfer.block_id] = self._read(transfer.block_id)
                assert content[-1][-len(transfer.token_ids) :] == transfer.token_ids
            else:
                self._write(transfer.block_id, [(-2,)] * self._runner.block_size)

    def end(self, index: int = 0, succeeded: bool = True) -> None:
        """Ends a transfer under way."""
        transfer = self.under_way.pop(index)
        if transfer.direction is Direction.STORE:
            content = self._contents.pop(transfer.block_id)
            assert self._read(transfer.block_id) == content, "a block was overwritten while it was stored"
            if succeeded:
                self.stored[transfer.block_hash] = content
        elif content := self.stored.get(transfer.block_hash, []) if succeeded else []:
            self._write(transfer.block_id, content)
            self.announced.discard(transfer.block_hash)
        else:
            self.stored.pop(transfer.block_hash, None)
            self.announced.discard(transfer.block_hash)
            succeeded = False
        self._ended.append(EndedTransfer(transfer, succeeded, 0.0))

    def take_ended(self) -> list[EndedTransfer]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        while self.under_way and not self.is_held_up:
            self.end()

    def remove(self, block_hashes: Sequence[bytes]) -> None:
        for block_hash in block_hashes:
            self.stored.pop(block_hash, None)

    def clear(self) -> None:
        self.stored.clear()

    def close(self) -> None:
        pass

    def _read(self, block_id: int) -> Content:
        return [self._runner.kv[block_id, offset] for offset in range(self._runner.block_size)]

    def _write(self, block_id: int, content: Content) -> None:
        self._runner.kv |= {(block_id, offset): each for offset, each in enumerate(content)}
