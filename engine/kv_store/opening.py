"""Opens the KV store of a model that is loaded."""

import logging
from pathlib import Path

from engine.attention.kv_cache import KVCache
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import ConfigError
from engine.kv_store.block_file import BlockFormat
from engine.kv_store.directory import StoreDirectory
from engine.kv_store.fingerprint import kv_fingerprint
from engine.kv_store.store import DiskKVStore

logger = logging.getLogger(__name__)


def open_store(config: EngineConfig, info: EngineInfo, cache: KVCache) -> DiskKVStore | None:
    """Returns the configured store; None if there is none, or if it cannot be used: a restarted engine goes on without
    it. Raises ConfigError for a configuration that cannot work."""
    if config.kv_store is None:
        return None
    fingerprint = kv_fingerprint(config, info, cache)
    num_bytes = sum(part.nbytes for part in cache.block_bytes(0))
    block_format = BlockFormat(bytes.fromhex(fingerprint), config.block_size, num_bytes)
    if block_format.file_bytes > config.kv_store_bytes:
        raise ConfigError(
            f"--kv-store-bytes {config.kv_store_bytes} is less than one block of {config.block_size} tokens takes, "
            f"{block_format.file_bytes}: give it more."
        )
    try:
        directory = StoreDirectory(Path(config.kv_store), fingerprint, config.kv_store_bytes)
    except OSError as error:
        logger.warning("no KV store: %s cannot be used: %s", config.kv_store, error)
        return None
    return DiskKVStore(cache, directory, block_format)
