"""Copies blocks and states between memory and the store's files, on one thread that reads and one that writes."""

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from engine.core.batch import BlockTransfer, Direction, EndedTransfer, Transfer
from engine.core.stats import KVStoreStats
from engine.core.stored_blocks import StoredBlocks
from engine.kv_store.block_file import BlockFormat, DamagedFileError
from engine.kv_store.directory import StoreDirectory

logger = logging.getLogger(__name__)

_NICENESS = 10  # of the threads: the steps come first
_REFRESH_S = 60.0
_PAUSE_S = 30.0  # between a write that failed and the next that is tried
_LOG_EVERY_S = 60.0
_CLOSE_S = 1.0

_Work = Transfer | Callable[[], None] | None  # for the writing thread; None ends it


class StoredMemory(NamedTuple):
    """Memory of blocks or of slots, which lies on the CPU, and the format of their files."""

    bytes_of: Callable[[int], list[np.ndarray]]
    """Returns the memory of one of them."""
    fill: Callable[[int, memoryview], None]
    """Overwrites it."""
    format: BlockFormat


class DiskKVStore:
    """A `KVStore` of files. Whatever the disk does short of hanging, transfers end: a read that fails is a miss, and
    what cannot be written is not stored."""

    def __init__(self, directory: StoreDirectory, blocks: StoredMemory, states: StoredMemory | None = None) -> None:
        """Transfers the blocks of the KV cache, and copies of states, if the model has some."""
        self._directory = directory
        self._block_memory = blocks
        self._state_memory = states
        self._to_read: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._ended: deque[EndedTransfer] = deque()
        self._has_ended = threading.Event()
        self._num_reads = 0  # under way, or in the queue
        self._writes: Counter[bytes] = Counter()  # names of what is being written, or in the queue
        self._read_bytes = self._written_bytes = self._num_damaged = 0
        self._write_again_s = self._log_again_s = 0.0
        self._refresh_again_s = time.monotonic() + _REFRESH_S
        self._threads = [_thread("kv-reader", self._read_all), _thread("kv-writer", self._write_all)]

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            is_load = transfer.direction is Direction.LOAD
            self._num_reads += is_load
            if not is_load:
                self._writes[transfer.name] += 1
            (self._to_read if is_load else self._to_write).put(transfer)

    def take_ended(self) -> list[EndedTransfer]:
        self._has_ended.clear()
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._num_reads -= sum(each.transfer.direction is Direction.LOAD for each in ended)
        self._writes -= Counter(each.transfer.name for each in ended if each.transfer.direction is Direction.STORE)
        return ended

    def wait(self, timeout_s: float) -> None:
        self._has_ended.wait(timeout_s)

    @property
    def blocks(self) -> StoredBlocks:
        return self._directory

    @property
    def stats(self) -> KVStoreStats:
        return KVStoreStats(
            store_bytes=self._directory.num_bytes,
            store_reads=self._num_reads,
            store_read_bytes=self._read_bytes,
            store_written_bytes=self._written_bytes,
            store_damaged_files=self._num_damaged,
        )

    def remove(self, names: Sequence[bytes]) -> None:
        self._directory.hide(names)
        self._to_write.put(partial(self._directory.remove_hidden, tuple(names)))

    def clear(self) -> None:
        self.remove([*{*self._directory.names, *self._writes}])

    def close(self) -> None:
        self._to_read.put(None)
        self._to_write.put(self._directory.write_times)
        self._to_write.put(None)
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # On the reading thread.

    def _read_all(self) -> None:
        while (transfer := self._to_read.get()) is not None:
            with self._outlived():
                self._read(transfer)

    def _read(self, transfer: Transfer) -> None:
        started_s = time.monotonic()
        succeeded = False
        try:
            memory, place = self._place_of(transfer)
            path = self._directory.path(transfer.name)
            memory.fill(place, memory.format.read(path, transfer.name, transfer.token_ids))
            self._read_bytes += memory.format.file_bytes
            succeeded = True
        except DamagedFileError as error:
            self._num_damaged += 1
            self._log("a file of the KV store is damaged and will be computed again: %s: %s", path, error)
            self._directory.remove(transfer.name)
        except FileNotFoundError:  # another server made room
            self._directory.forget(transfer.name)
        except OSError as error:
            self._log("the KV store cannot be read: %s", error)
        finally:
            self._end(transfer, succeeded, started_s)

    # On the writing thread.

    def _write_all(self) -> None:
        while True:
            with suppress(queue.Empty):
                work = self._to_write.get(timeout=_REFRESH_S)
                if work is None:
                    return
                with self._outlived():
                    work() if callable(work) else self._write(work)
            if time.monotonic() >= self._refresh_again_s:
                with self._outlived():
                    self._directory.refresh()
                self._refresh_again_s = time.monotonic() + _REFRESH_S

    def _write(self, transfer: Transfer) -> None:
        started_s = time.monotonic()
        succeeded = False
        try:
            if started_s >= self._write_again_s and not self._directory.num_stored([transfer.name]):
                self._add(transfer)
            succeeded = True
        except OSError as error:
            self._write_again_s = started_s + _PAUSE_S
            self._log("the KV store cannot be written: %s", error)
        finally:
            self._end(transfer, succeeded, started_s)

    def _add(self, transfer: Transfer) -> None:
        memory, place = self._place_of(transfer)
        parts, num_bytes = memory.bytes_of(place), memory.format.file_bytes
        write = memory.format.write
        self._directory.add(transfer.name, num_bytes, lambda fd: write(fd, transfer.name, transfer.token_ids, parts))
        self._written_bytes += num_bytes

    # On both.

    def _place_of(self, transfer: Transfer) -> tuple[StoredMemory, int]:
        if isinstance(transfer, BlockTransfer):
            return self._block_memory, transfer.block_id
        assert self._state_memory is not None
        return self._state_memory, transfer.slot

    def _end(self, transfer: Transfer, succeeded: bool, started_s: float) -> None:
        self._ended.append(EndedTransfer(transfer, succeeded, time.monotonic() - started_s))
        self._has_ended.set()

    @contextmanager
    def _outlived(self) -> Iterator[None]:
        """Logs whatever else goes wrong with a piece of work: a thread that ends leaves those behind it unanswered."""
        try:
            yield
        except Exception as error:
            self._log("the KV store failed: %r", error, trace=True)

    def _log(self, text: str, *args: object, trace: bool = False) -> None:
        """Warns of what may happen with every block: once a minute."""
        now_s = time.monotonic()
        if now_s >= self._log_again_s:
            self._log_again_s = now_s + _LOG_EVERY_S
            logger.warning(text, *args, exc_info=trace)


def _thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Starts a thread that gives way to the steps."""

    def run() -> None:
        with suppress(OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
