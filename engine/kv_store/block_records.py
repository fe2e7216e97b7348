"""Records of the KV blocks in shared memory, from which the next engine process knows which blocks hold which tokens.

Memory layout: the digest of what made the blocks (32 bytes), then for each block the time of its last use (8 bytes, a
counter), then for each block its hash (32 bytes). A time of 0 means that the block holds nothing. All of a block, and
then its hash, are written before its time, and its time becomes 0 before any of it is written again. So what has a time
is whole, wherever a kill meets the process: writes of a thread reach memory in their order, and those of the kernels'
threads are done when a step returns.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.attention.kv_cache import KVCache
from engine.core.block_records import BlockRecords, NoBlockRecords
from engine.core.config import EngineConfig, EngineInfo
from engine.kv_store.fingerprint import kv_fingerprint

logger = logging.getLogger(__name__)

_DIGEST_BYTES = _HASH_BYTES = 32
_TIME_BYTES = 8


def open_records(config: EngineConfig, info: EngineInfo, cache: KVCache) -> BlockRecords:
    """Returns the records of the blocks of `cache`, which is the model's own part of it. Where its memory ends with the
    process none are kept."""
    if cache.shared is None:
        return NoBlockRecords()
    parts = (kv_fingerprint(config, info, cache), info.num_blocks, cache.groups, cache.shared.handed_out_bytes)
    digest = hashlib.sha256(repr(parts).encode()).digest()
    records = SharedBlockRecords(cache.shared.take(num_record_bytes(info.num_blocks)), info.num_blocks, digest)
    if records.found:
        cache.map_allocated(max(block_id for block_id, _ in records.found))
        logger.info("%d KV blocks are there from before", len(records.found))
    return records


def num_record_bytes(num_blocks: int) -> int:
    """Bytes that the records of so many blocks take."""
    return _DIGEST_BYTES + num_blocks * (_TIME_BYTES + _HASH_BYTES)


class SharedBlockRecords:
    """`BlockRecords` in a writable buffer, which others may map later."""

    def __init__(self, memory: Any, num_blocks: int, digest: bytes) -> None:
        """Finds what `memory` holds if its records were made with the same `digest`, and empties it if not."""
        end_of_times = _DIGEST_BYTES + num_blocks * _TIME_BYTES
        own = np.frombuffer(memory, np.uint8, _DIGEST_BYTES)
        self._times = np.frombuffer(memory, np.uint64, num_blocks, _DIGEST_BYTES)
        hashes = np.frombuffer(memory, np.uint8, num_blocks * _HASH_BYTES, end_of_times)
        self._hashes = hashes.reshape(num_blocks, _HASH_BYTES)
        if own.tobytes() != digest:
            own[:] = 0  # until the records of others are gone
            self.clear()
            own[:] = np.frombuffer(digest, np.uint8)
        self._now = int(self._times.max())
        recorded = [int(block_id) for block_id in np.argsort(self._times) if self._times[block_id]]
        self.found: Sequence[tuple[int, bytes]] = [(each, self._hashes[each].tobytes()) for each in recorded]

    def add(self, block_id: int, block_hash: bytes) -> None:
        self._hashes[block_id] = np.frombuffer(block_hash, np.uint8)
        self.touch(block_id)

    def touch(self, block_id: int) -> None:
        self._now += 1
        self._times[block_id] = self._now

    def remove(self, block_id: int) -> None:
        self._times[block_id] = 0

    def clear(self) -> None:
        self._times[:] = 0
