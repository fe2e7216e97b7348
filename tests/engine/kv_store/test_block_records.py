"""Records of blocks are true wherever a kill meets the process that keeps them."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.kv_cache import KVCache, LayerShape
from engine.core.block_records import NoBlockRecords
from engine.core.config import EngineConfig
from engine.host.shared_pages import SharedPages
from engine.kv_store.block_records import SharedBlockRecords, num_record_bytes, open_records
from engine.scheduling.prefix_cache import PrefixCache
from tests.engine.fakes import fake_info

NUM_BLOCKS = 6
DIGEST = hashlib.sha256(b"these").digest()
OTHER = hashlib.sha256(b"others").digest()


class KilledError(Exception):
    pass


class MortalArray(np.ndarray):  # type: ignore[type-arg]
    """An array that writes byte by byte, until the process is killed."""

    def __array_finalize__(self, of: Any) -> None:
        self.budget: list[int] = getattr(of, "budget", [0])  # shared by all arrays of a process

    def __setitem__(self, key: Any, value: Any) -> None:
        own = np.asarray(self)[key : key + 1] if isinstance(key, int) else np.asarray(self)[key]
        data = np.broadcast_to(np.asarray(value, self.dtype), own.shape).tobytes()
        for at, byte in enumerate(data):
            if self.budget[0] == 0:
                raise KilledError
            self.budget[0] -= 1
            own.view(np.uint8).reshape(-1)[at] = byte


def hash_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


class Process:
    """A process that writes blocks and keeps records of them, in memory that outlives it."""

    def __init__(self, memory: bytearray, content: dict[int, bytes], monkeypatch: pytest.MonkeyPatch, budget: int):
        self.budget = [budget]
        frombuffer = np.frombuffer

        def mortal(buffer: Any, *shape: Any) -> Any:
            array = frombuffer(buffer, *shape)
            if buffer is not memory:
                return array
            own = array.view(MortalArray)
            own.budget = self.budget
            return own

        monkeypatch.setattr(np, "frombuffer", mortal)
        try:
            self.records = SharedBlockRecords(memory, NUM_BLOCKS, DIGEST)
        finally:
            monkeypatch.setattr(np, "frombuffer", frombuffer)
        self.content = content
        self.cache = PrefixCache(16, self.records)

    def write(self, block_id: int, number: int) -> None:
        """Writes a block over another one, in two halves."""
        if self.cache.holds(block_id):
            self.cache.forget(block_id)
        for half in (b"torn", hash_of(number)):
            if self.budget[0] == 0:
                raise KilledError
            self.budget[0] -= 1
            self.content[block_id] = half
        self.cache.put(hash_of(number), block_id)


def run_until_killed(memory: bytearray, monkeypatch: pytest.MonkeyPatch, budget: int) -> tuple[dict[int, bytes], bool]:
    """Runs a process that is killed after so many writes; returns the blocks' content, and whether it was."""
    content: dict[int, bytes] = {}
    try:
        process = Process(memory, content, monkeypatch, budget)
        for block_id in range(NUM_BLOCKS):
            process.write(block_id, block_id)
        process.cache.touch(0)
        process.write(2, 7)
        process.write(1, 2)
        process.cache.clear()
        process.write(3, 8)
    except KilledError:
        return content, True
    return content, False


def found(memory: bytearray, digest: bytes = DIGEST) -> dict[int, bytes]:
    return dict(SharedBlockRecords(memory, NUM_BLOCKS, digest).found)


@pytest.mark.parametrize("before", [b"", b"others"])
def test_what_is_recorded_is_whole_at_every_byte(monkeypatch: pytest.MonkeyPatch, before: bytes) -> None:
    most, was_killed, budget = 0, True, 0
    while was_killed:
        memory = bytearray(num_record_bytes(NUM_BLOCKS))
        if before:
            theirs = SharedBlockRecords(memory, NUM_BLOCKS, OTHER)
            for block_id in range(NUM_BLOCKS):
                theirs.add(block_id, hash_of(100 + block_id))
        content, was_killed = run_until_killed(memory, monkeypatch, budget)
        recorded = found(memory)
        assert recorded.items() <= content.items(), budget
        most, budget = max(most, len(recorded)), budget + 1
    assert most == NUM_BLOCKS and budget > 500
    assert recorded == {3: hash_of(8)}


def test_others_find_nothing() -> None:
    memory = bytearray(num_record_bytes(NUM_BLOCKS))
    SharedBlockRecords(memory, NUM_BLOCKS, DIGEST).add(3, hash_of(3))
    assert found(memory) == {3: hash_of(3)}
    assert found(memory, OTHER) == {} == found(memory)


def test_noise_is_nothing() -> None:
    assert found(bytearray(range(256)) * 2) == {}


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(0, NUM_BLOCKS - 1))))
def test_blocks_are_found_in_the_order_of_their_use(steps: list[tuple[str, int]]) -> None:
    memory = bytearray(num_record_bytes(NUM_BLOCKS))
    records, order = SharedBlockRecords(memory, NUM_BLOCKS, DIGEST), dict[int, None]()
    for how, block_id in steps:
        if (how == "add") == (block_id in order):
            continue
        order.pop(block_id, None)
        if how == "remove":
            records.remove(block_id)
            continue
        order[block_id] = None
        if how == "add":
            records.add(block_id, hash_of(block_id))
        else:
            records.touch(block_id)
        records = SharedBlockRecords(memory, NUM_BLOCKS, DIGEST)
    again = SharedBlockRecords(memory, NUM_BLOCKS, DIGEST)
    assert again.found == [(block_id, hash_of(block_id)) for block_id in order]


def records_in(memory_fd: int | None, num_blocks: int = 8, dtype: torch.dtype = torch.bfloat16, **info: Any) -> Any:
    shared = None if memory_fd is None else SharedPages(memory_fd, 0)
    cache = KVCache([LayerShape(2, 8, 8)], num_blocks, 4, dtype, torch.device("cpu"), shared=shared)
    own = msgspec.structs.replace(fake_info(num_blocks, 4), **info)
    return open_records(EngineConfig(model="fake"), own, cache)


def test_a_cache_that_ends_with_its_process_has_no_records() -> None:
    assert isinstance(records_in(None), NoBlockRecords)


@pytest.mark.parametrize(
    "open_another",
    [
        lambda fd: records_in(fd, weights_fingerprint="4567"),
        lambda fd: records_in(fd, dtype=torch.float16),
        lambda fd: records_in(fd, num_blocks=9),
        lambda fd: records_in(fd, attention="reference"),
    ],
)
def test_only_the_same_model_in_the_same_format_finds_blocks(
    memory_fd: int, open_another: Callable[[int], Any]
) -> None:
    records_in(memory_fd).add(5, hash_of(5))
    assert records_in(memory_fd).found == [(5, hash_of(5))]
    assert open_another(memory_fd).found == []
    assert records_in(memory_fd).found == []
