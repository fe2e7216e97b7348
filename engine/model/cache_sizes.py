"""How many blocks of KV, slots of recurrent states and copies of these the memory for caches has room for."""

import logging
from dataclasses import dataclass

from engine.checkpoint.adapters.files import size_of_files
from engine.core.config import EngineConfig, StepLimits
from engine.core.errors import ConfigError
from engine.core.kv_groups import KVGroups

__all__ = ["CacheMemory", "CacheSizes", "cache_sizes", "memory_for_caches"]

logger = logging.getLogger(__name__)

MAX_DEFAULT_KV_BYTES = 4 << 30  # on the CPU, where the KV cache shares memory with everything else
SHARE_OF_AVAILABLE = {"cpu": 0.5, "cuda": 0.9}


@dataclass(frozen=True)
class CacheMemory:
    """The memory for KV and states, and what these take of it, on all ranks together."""

    num_bytes: int
    state_bytes: int
    """Bytes of a request's states; 0 for a model without any."""
    block_bytes: int
    """Bytes of a block; 0 for a model without attention."""


@dataclass(frozen=True)
class CacheSizes:
    """What is allocated, and the context length that it allows."""

    num_blocks: int
    num_slots: int
    num_copies: int
    max_model_len: int


def memory_for_caches(config: EngineConfig, device_type: str, free_bytes: int) -> int:
    """Returns the bytes for KV and states: as configured, else a share of the free ones that adapters do not need:
    of these several ranks, which on the CPU share the memory, have at most a whole each."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    num_sharing = config.tensor_parallel_size if device_type == "cpu" else 1
    kept_bytes = num_sharing * sum(size_of_files(each.path) for each in config.adapters)
    share = int((free_bytes - kept_bytes) * SHARE_OF_AVAILABLE[device_type])
    return min(share, MAX_DEFAULT_KV_BYTES) if device_type == "cpu" else share


def cache_sizes(
    config: EngineConfig, limits: StepLimits, max_model_len: int, memory: CacheMemory, groups: KVGroups
) -> CacheSizes:
    """Returns the sizes of the caches. A configured context length must fit, else this raises ConfigError; the model's
    own limit is lowered to what fits."""
    num_slots = _num_slots(limits.max_num_seqs, memory)
    usable = limits.max_num_seqs * groups.num_groups * -(-max_model_len // config.block_size)
    kv_bytes = memory.num_bytes - num_slots * memory.state_bytes
    num_blocks = config.num_blocks or _num_blocks(config, memory.block_bytes, kv_bytes, usable)
    capacity = groups.max_tokens(num_blocks, config.block_size, limits.max_num_batched_tokens, max_model_len)
    if capacity < max_model_len:
        _check_capacity(config, capacity, max_model_len)
    return CacheSizes(num_blocks, num_slots, _num_copies(config, memory), min(capacity, max_model_len))


def _num_slots(max_num_seqs: int, memory: CacheMemory) -> int:
    """Returns how many requests get a slot for their states: as many as may run, if these take at most half of the
    memory, else as many as do, and one at least."""
    if not memory.state_bytes:
        return 0
    num_slots = min(max_num_seqs, max(1, memory.num_bytes // 2 // memory.state_bytes))
    if num_slots < max_num_seqs:
        logger.warning(
            "the recurrent states of a request take %.1f MiB: %d requests run at once, not %d",
            memory.state_bytes / 2**20,
            num_slots,
            max_num_seqs,
        )
    return num_slots


def _num_copies(config: EngineConfig, memory: CacheMemory) -> int:
    """Returns how many copies of a request's states are kept, beside that memory."""
    if not memory.state_bytes or not config.enable_prefix_caching:
        return 0
    most = memory.num_bytes // 8 if config.state_cache_bytes is None else config.state_cache_bytes
    return max(0, most) // memory.state_bytes


def _num_blocks(config: EngineConfig, block_bytes: int, kv_bytes: int, usable: int) -> int:
    """Returns how many blocks fit; by default no more than all sequences together can use."""
    if block_bytes == 0:  # a model without attention: its blocks only count tokens
        return usable
    num_blocks = max(0, kv_bytes) // block_bytes
    return num_blocks if config.kv_cache_bytes is not None else min(num_blocks, usable)


def _check_capacity(config: EngineConfig, capacity: int, max_model_len: int) -> None:
    """Raises ConfigError if contexts of `max_model_len` tokens must fit, or none does; else warns."""
    if config.max_model_len is not None or capacity < 1:
        setting = "--kv-cache-memory-bytes" if config.num_blocks is None else "--num-gpu-blocks-override"
        raise ConfigError(
            f"The KV cache has room for {capacity} tokens, less than a context of {max_model_len}: "
            f"give it more with {setting}, or lower --max-model-len."
        )
    logger.warning("the KV cache holds %d tokens: contexts are limited to that, not %d", capacity, max_model_len)
