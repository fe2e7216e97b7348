"""Transfers end, whatever the disk does, and what is loaded is what was stored."""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.kv_cache import KVCache, LayerShape
from engine.core.batch import BlockTransfer, Direction, EndedTransfer, StateTransfer, Transfer
from engine.kv_store import store as store_module
from engine.kv_store.block_file import BlockFormat
from engine.kv_store.directory import StoreDirectory
from engine.kv_store.store import DiskKVStore, StoredMemory
from engine.mixers.state import StateCache, StateShape

FINGERPRINT = "0123456789abcdef" * 2
NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 8, 4, 6


class Rig:
    """A store over a KV cache and states of random numbers."""

    def __init__(self, root: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        shapes = [LayerShape(2, 8, 8), LayerShape(1, 16, 4)]
        self.cache = KVCache(shapes, NUM_BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"))
        for layer in self.cache.layers:
            for tensor in layer:
                tensor.copy_(torch.randn(tensor.shape))
        state_shapes = [StateShape((2, 3), torch.float32), StateShape((5,), dtype)]
        self.states = StateCache(state_shapes, NUM_SLOTS - 2, torch.device("cpu"), 2)
        for tensor in self.states.states:
            tensor.copy_(torch.randn(tensor.shape))
        self.directory = StoreDirectory(root, FINGERPRINT, 1 << 20)
        blocks = StoredMemory(self.cache.block_bytes, self.cache.fill_block, format_of(self.cache.block_bytes(0)))
        states = StoredMemory(self.states.slot_bytes, self.states.fill_slot, format_of(self.states.slot_bytes(0)))
        self.store = DiskKVStore(self.directory, blocks, states)

    def run(self, direction: Direction, *blocks: tuple[int, int]) -> list[bool]:
        """Transfers pairs of a block and what it is called, and returns which succeeded."""
        return self.run_all([transfer(direction, *each) for each in blocks])

    def run_all(self, transfers: Sequence[Transfer]) -> list[bool]:
        self.store.start(transfers)
        ended: list[EndedTransfer] = []
        while len(ended) < len(transfers):
            self.store.wait(10.0)
            ended += self.store.take_ended()
        assert [each.transfer for each in ended] == transfers
        return [each.succeeded for each in ended]

    def content(self, block_id: int) -> list[bytes]:
        return [part.tobytes() for part in self.cache.block_bytes(block_id)]

    def state(self, slot: int) -> list[bytes]:
        return [part.tobytes() for part in self.states.slot_bytes(slot)]

    def file(self, index: int) -> Path:
        return Path(self.directory.path(transfer(Direction.LOAD, 0, index).name))

    def state_file(self, index: int) -> Path:
        return Path(self.directory.path(state_transfer(Direction.LOAD, 0, index).name))


def format_of(parts: Sequence[np.ndarray]) -> BlockFormat:
    return BlockFormat(bytes.fromhex(FINGERPRINT), BLOCK_SIZE, sum(part.nbytes for part in parts))


def transfer(direction: Direction, block_id: int, index: int) -> BlockTransfer:
    return BlockTransfer(direction, block_id, index.to_bytes(32, "big"), tuple(range(index, index + BLOCK_SIZE)))


def state_transfer(direction: Direction, slot: int, index: int) -> StateTransfer:
    return StateTransfer(direction, slot, index.to_bytes(32, "big"), tuple(range(index, index + BLOCK_SIZE)))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "store")
    yield made
    made.store.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_loaded_is_what_was_stored_in_all_layers(tmp_path: Path, dtype: torch.dtype) -> None:
    rig = Rig(tmp_path, dtype)
    assert rig.run(Direction.STORE, (1, 100), (2, 200)) == [True, True]
    others = {block: rig.content(block) for block in range(NUM_BLOCKS) if block not in (5, 6)}
    assert rig.run(Direction.LOAD, (5, 200), (6, 100)) == [True, True]
    assert rig.content(5) == rig.content(2) and rig.content(6) == rig.content(1)
    assert others == {block: rig.content(block) for block in others}
    rig.store.close()


def test_states_are_stored_beside_the_block_that_they_follow(rig: Rig, tmp_path: Path) -> None:
    assert rig.run_all([transfer(Direction.STORE, 1, 100), state_transfer(Direction.STORE, 2, 100)]) == [True, True]
    other = Rig(tmp_path / "store")
    others = {slot: other.state(slot) for slot in range(NUM_SLOTS) if slot != 5}
    loads = [transfer(Direction.LOAD, 3, 100), state_transfer(Direction.LOAD, 5, 100)]
    assert other.run_all(loads) == [True, True]
    assert other.content(3) == rig.content(1) and other.state(5) == rig.state(2)
    assert others == {slot: other.state(slot) for slot in others}
    sizes = [file.stat().st_size for file in (rig.file(100), rig.state_file(100))]
    assert other.store.stats.store_bytes == other.store.stats.store_read_bytes == sum(sizes) and sizes[0] != sizes[1]
    other.store.close()


@pytest.mark.parametrize("damage", ["half", "flipped", "other states", "block", "other tokens", "missing"])
def test_damaged_states_are_a_miss_and_gone(rig: Rig, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    rig.run_all([state_transfer(Direction.STORE, slot, 100 * slot) for slot in (1, 2)])
    rig.run(Direction.STORE, (1, 100))
    file, load = rig.state_file(100), state_transfer(Direction.LOAD, 5, 100)
    whole = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "other tokens":
        load = replace(load, token_ids=(9,) * BLOCK_SIZE)
    else:
        others = {"other states": rig.state_file(200).read_bytes(), "block": rig.file(100).read_bytes()}
        whole[-40] ^= 1
        file.write_bytes({"half": whole[:50], "flipped": whole, **others}[damage])
    before = rig.state(5)
    assert rig.run_all([load]) == [False]
    assert rig.state(5) == before and not file.exists() and rig.file(100).exists()
    assert rig.store.stats.store_damaged_files == (damage != "missing") == ("damaged" in caplog.text)
    again = [state_transfer(Direction.STORE, 1, 100), state_transfer(Direction.LOAD, 5, 100)]
    assert [rig.run_all([each]) for each in again] == [[True], [True]] and rig.state(5) == rig.state(1)


def test_another_store_loads_it(rig: Rig, tmp_path: Path) -> None:
    rig.run(Direction.STORE, (1, 100))
    other = Rig(tmp_path / "store")
    assert other.run(Direction.LOAD, (3, 100)) == [True]
    assert other.content(3) == rig.content(1)
    other.store.close()


def test_removed_blocks_are_gone_and_so_are_those_given_before(rig: Rig) -> None:
    hashes = [transfer(Direction.STORE, 1, index).name for index in (100, 200)]
    rig.run(Direction.STORE, (1, 100), (3, 300))
    rig.store.start([transfer(Direction.STORE, 2, 200)])
    rig.store.remove(hashes)
    while not rig.store.take_ended():
        rig.store.wait(10.0)
    rig.run(Direction.STORE, (4, 400))
    assert [rig.file(index).exists() for index in (100, 200, 300, 400)] == [False, False, True, True]
    assert rig.run(Direction.LOAD, (5, 100)) == [False]


@pytest.mark.parametrize("clears", [False, True])
def test_what_is_removed_is_never_found_again_while_the_disk_is_slow(
    rig: Rig, clears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is being written, and what waits for that."""
    begun, goes_on, writev = threading.Event(), threading.Event(), os.writev

    def wait(fd: int, parts: Sequence[bytes]) -> int:
        begun.set()
        assert goes_on.wait(30)
        return writev(fd, parts)

    names = [transfer(Direction.STORE, 1, index).name for index in (100, 200, 300)]
    rig.run(Direction.STORE, (1, 100))
    monkeypatch.setattr(os, "writev", wait)
    rig.store.start([transfer(Direction.STORE, 2, 200), transfer(Direction.STORE, 3, 300)])
    assert begun.wait(30)
    for _ in range(2):
        rig.store.clear() if clears else rig.store.remove(names)
    found, remove = [], rig.directory.remove
    monkeypatch.setattr(rig.directory, "remove", lambda name: (found.append(stored(rig, names)), remove(name)))
    found.append(stored(rig, names))
    rig.store.start([transfer(Direction.STORE, 4, 200)])
    goes_on.set()
    ended: list[EndedTransfer] = []
    while len(ended) < 3:
        rig.store.wait(10.0)
        ended += rig.store.take_ended()
    assert {each for all_found in found for each in all_found} == {False} and len(found) > 3
    assert stored(rig, names) == [False, True, False], "it was computed again"
    assert [rig.file(index).exists() for index in (100, 200, 300)] == [False, True, False]


def stored(rig: Rig, names: Sequence[bytes]) -> list[bool]:
    return [rig.directory.num_stored([name]) == 1 for name in names]


def test_bytes_are_counted(rig: Rig) -> None:
    rig.run(Direction.STORE, (1, 100), (2, 200))
    size = rig.file(100).stat().st_size
    rig.run(Direction.LOAD, (3, 100))
    stats = rig.store.stats
    assert (stats.store_bytes, stats.store_written_bytes, stats.store_read_bytes) == (2 * size, 2 * size, size)
    assert (stats.store_reads, stats.store_damaged_files) == (0, 0)


def test_what_is_there_is_not_written_again(rig: Rig) -> None:
    rig.run(Direction.STORE, (1, 100))
    before = rig.file(100).stat().st_ino
    assert rig.run(Direction.STORE, (1, 100)) == [True]
    assert rig.file(100).stat().st_ino == before


@pytest.mark.parametrize("damage", ["half", "flipped", "foreign", "empty"])
def test_a_damaged_file_is_a_miss_a_log_line_and_gone(rig: Rig, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    rig.run(Direction.STORE, (1, 100), (2, 200))
    file = rig.file(100)
    whole = file.read_bytes()
    flipped = bytes([whole[-40] ^ 4])
    contents = {"half": whole[: len(whole) // 2], "flipped": whole[:-40] + flipped + whole[-39:]}
    file.write_bytes({**contents, "foreign": rig.file(200).read_bytes(), "empty": b""}[damage])
    before = rig.content(3)
    assert rig.run(Direction.LOAD, (3, 100)) == [False]
    assert rig.content(3) == before and not file.exists() and "damaged" in caplog.text
    assert rig.store.stats.store_damaged_files == 1
    assert rig.run(Direction.STORE, (1, 100)) == [True] and rig.run(Direction.LOAD, (3, 100)) == [True]


def test_a_file_that_another_server_deleted_is_a_miss_without_a_word(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.run(Direction.STORE, (1, 100))
    rig.file(100).unlink()
    assert rig.run(Direction.LOAD, (3, 100)) == [False]
    assert rig.directory.num_stored([transfer(Direction.LOAD, 3, 100).name]) == 0 and not caplog.text


def test_a_disk_that_cannot_be_read_is_a_miss(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.run(Direction.STORE, (1, 100))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "readv", fail)
    assert rig.run(Direction.LOAD, (3, 100), (4, 100)) == [False, False]
    assert caplog.text.count("cannot be read") == 1, "one line, not one a block"
    monkeypatch.undo()
    assert rig.run(Direction.LOAD, (3, 100)) == [True]


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_full_disk_leaves_no_half_file_and_is_tried_again_later(
    rig: Rig, is_partial: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writev = os.writev

    def fill(fd: int, parts: Sequence[bytes]) -> int:
        if is_partial:
            return writev(fd, parts[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", fill)
    assert rig.run(Direction.STORE, (1, 100)) == [False]
    monkeypatch.undo()
    assert not list(rig.file(100).parent.iterdir()) and "cannot be written" in caplog.text
    assert rig.run(Direction.STORE, (1, 100)) == [True] and not rig.file(100).exists(), "it rests a while"
    rig.store._write_again_s = 0.0
    assert rig.run(Direction.STORE, (1, 100)) == [True] and rig.file(100).exists()


def test_a_directory_that_vanished_ends_no_thread(rig: Rig) -> None:
    rig.run(Direction.STORE, (1, 100))
    rig.file(100).unlink()
    rig.file(100).parent.rmdir()
    assert rig.run(Direction.STORE, (2, 200)) == [False]
    assert rig.run(Direction.LOAD, (3, 100)) == [False]


@pytest.mark.parametrize("method", ["read", "write"])
def test_no_mistake_ends_a_thread(
    rig: Rig, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a mistake")

    rig.run(Direction.STORE, (1, 100))
    monkeypatch.setattr(BlockFormat, method, fail)
    monkeypatch.setattr(rig.directory, "remove_hidden", fail)
    rig.store.remove([b"x"])
    assert rig.run(Direction.LOAD if method == "read" else Direction.STORE, (2, 200 - 100 * (method == "read"))) == [
        False
    ]
    monkeypatch.undo()
    assert rig.run(Direction.STORE, (2, 200)) == [True] and rig.run(Direction.LOAD, (3, 200)) == [True]
    assert caplog.text.count("ValueError: a mistake") == 1, "one line, not one a block"


def test_closing_writes_what_was_asked_for(rig: Rig) -> None:
    rig.store.start([transfer(Direction.STORE, block, block) for block in range(NUM_BLOCKS)])
    rig.store.close()
    assert all(rig.file(block).exists() for block in range(NUM_BLOCKS))


def test_clearing_deletes_what_was_given_before(rig: Rig) -> None:
    rig.run(Direction.STORE, (1, 100))
    rig.store.clear()
    rig.run(Direction.STORE, (2, 200))
    assert not rig.file(100).exists() and rig.file(200).exists()


def test_what_others_did_is_seen_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_REFRESH_S", 0.01)
    mine, theirs = Rig(tmp_path), Rig(tmp_path)
    theirs.run(Direction.STORE, (1, 100))
    deadline_s = time.monotonic() + 30
    while not mine.directory.num_stored([transfer(Direction.LOAD, 0, 100).name]):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert mine.run(Direction.LOAD, (3, 100)) == [True]
    mine.store.close()
    theirs.store.close()
