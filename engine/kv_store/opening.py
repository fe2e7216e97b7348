"""Opens the KV store of a model that is loaded."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.attention.kv_cache import KVCache
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import ConfigError
from engine.kv_store.block_file import BlockFormat
from engine.kv_store.directory import StoreDirectory
from engine.kv_store.fingerprint import kv_fingerprint
from engine.kv_store.store import DiskKVStore, StoredMemory
from engine.mixers.state import StateCache

logger = logging.getLogger(__name__)


def open_store(
    config: EngineConfig, info: EngineInfo, cache: KVCache, states: StateCache | None = None
) -> DiskKVStore | None:
    """Returns the configured store; None if there is none, or if it cannot be used: a restarted engine goes on without
    it. `states` are those of a model that has some. Raises ConfigError for a configuration that cannot work."""
    if config.kv_store is None:
        return None
    if not info.can_cache_prefixes:
        raise ConfigError(
            "--kv-store keeps copies of recurrent states, for which --state-cache-memory-bytes leaves no room: a "
            f"request's take {info.state_bytes_per_request} bytes."
        )
    fingerprint = kv_fingerprint(config, info, cache, states)
    blocks = _stored_memory(config, fingerprint, cache.block_bytes, cache.fill_block)
    _check_size(config, f"one block of {config.block_size} tokens takes", blocks)
    slots = None
    if states is not None and states.states:
        slots = _stored_memory(config, fingerprint, states.slot_bytes, states.fill_slot)
        _check_size(config, "the recurrent states of one request take", slots)
    try:
        directory = StoreDirectory(Path(config.kv_store), fingerprint, config.kv_store_bytes)
    except OSError as error:
        logger.warning("no KV store: %s cannot be used: %s", config.kv_store, error)
        return None
    return DiskKVStore(directory, blocks, slots)


def _stored_memory(
    config: EngineConfig,
    fingerprint: str,
    bytes_of: Callable[[int], list[np.ndarray]],
    fill: Callable[[int, memoryview], None],
) -> StoredMemory:
    num_bytes = sum(part.nbytes for part in bytes_of(0))
    return StoredMemory(bytes_of, fill, BlockFormat(bytes.fromhex(fingerprint), config.block_size, num_bytes))


def _check_size(config: EngineConfig, what_takes: str, memory: StoredMemory) -> None:
    if memory.format.file_bytes > config.kv_store_bytes:
        raise ConfigError(
            f"--kv-store-bytes {config.kv_store_bytes} is less than {what_takes}, {memory.format.file_bytes}: "
            "give it more."
        )
