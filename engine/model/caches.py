"""The memory of a loaded model for keys and values, and for recurrent states, as large as the settings and the machine
have it."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from engine.attention.kv_cache import KVCache
from engine.core.config import EngineConfig
from engine.core.errors import ModelMemoryError
from engine.core.kv_groups import KVGroups
from engine.host.available_memory import available_bytes, is_memory_shortage
from engine.host.shared_pages import SharedPages
from engine.mixers.state import StateCache, bytes_per_slot
from engine.model.cache_sizes import CacheMemory, cache_sizes, memory_for_caches
from engine.runner.loaded_model import LoadedModel
from engine.runner.window_groups import window_groups
from engine.weights.rank_group import RankGroup

__all__ = ["Caches", "bytes_of_all", "new_caches"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caches:
    """The caches of a model; of one of several ranks, its part of these, with as many blocks and slots as all have."""

    kv: KVCache
    groups: KVGroups
    """The groups of layers, each of which has blocks of its own."""
    states: StateCache
    max_model_len: int
    """The context length that they allow."""


class _KVSize(NamedTuple):
    num_blocks: int
    block_size: int
    num_bytes: int
    """What the blocks take on all ranks together."""


def new_caches(
    config: EngineConfig,
    model: LoadedModel,
    max_model_len: int,
    step_bytes: int,
    group: RankGroup,
    kv_memory_fd: int | None,
) -> Caches:
    """Allocates the caches for contexts of up to `max_model_len` tokens, which take the configured memory on all ranks
    together; else a share of what is free beside `step_bytes`. The KV cache lies in the memory of the file
    `kv_memory_fd` where that can be. Raises ConfigError or ModelMemoryError."""
    free_bytes = available_bytes(model.device) - step_bytes
    groups = window_groups(config, model)
    own_bytes = bytes_per_slot(model.states), model.bytes_per_block(config.block_size, groups.of_layers)
    cache_bytes = memory_for_caches(config, model.device.type, free_bytes)
    if model.device.type == "cuda" and config.kv_cache_bytes is None:
        cache_bytes = bytes_of_all(cache_bytes, own_bytes[1], group)
    memory = CacheMemory(group.of_first(cache_bytes), *map(int, group.sum(*own_bytes)))
    sizes = cache_sizes(config, config.limits_on(model.device.type), max_model_len, memory, groups)
    states = StateCache(model.states, sizes.num_slots, model.device, sizes.num_copies)
    kv_size = _KVSize(sizes.num_blocks, config.block_size, sizes.num_blocks * memory.block_bytes)
    shared = _shared_pages(config, model, kv_size.num_bytes, kv_memory_fd)
    return Caches(_new_kv_cache(model, kv_size, groups, shared), groups, states, sizes.max_model_len)


def bytes_of_all(own_bytes: int, block_bytes: int, group: RankGroup) -> int:
    """Returns how much all ranks together may take where each has `own_bytes` of its own memory, of which a block takes
    `block_bytes`: so much that none has to take more than it has."""
    ranks = group.values_of_all(own_bytes, block_bytes)
    blocks_bytes = sum(each for _, each in ranks)
    if not blocks_bytes:
        return int(group.size * min(own for own, _ in ranks))
    return int(min(own * blocks_bytes // each for own, each in ranks if each))


def _shared_pages(config: EngineConfig, model: LoadedModel, num_bytes: int, fd: int | None) -> SharedPages | None:
    """Returns the memory of this file, for a cache of `num_bytes`, if another process could go on with the blocks in
    it."""
    if fd is None or model.device.type != "cpu" or model.states or not config.enable_prefix_caching:
        return None
    try:
        return SharedPages(fd, num_bytes)
    except OSError as error:
        logger.warning("what is cached will not outlive the engine process: no memory can be shared: %s", error)
        return None


def _new_kv_cache(model: LoadedModel, size: _KVSize, groups: KVGroups, shared: SharedPages | None) -> KVCache:
    """Allocates the KV cache, or raises ModelMemoryError where memory is short.

    On the CPU that is checked before: the operating system grants more memory than there is, and kills the process once
    it is used.
    """
    available = available_bytes(model.device) + (shared.allocated_bytes if shared else 0)
    shortage = ModelMemoryError(
        f"There is not enough memory for a KV cache of {size.num_blocks:,} blocks of {size.block_size} tokens: it "
        f"takes {size.num_bytes / 2**20:,.0f} MiB, and {available / 2**20:,.0f} MiB are available. "
        "Free some, or give it less with --kv-cache-memory-bytes or --num-gpu-blocks-override."
    )
    if model.device.type == "cpu" and size.num_bytes > available:
        raise shortage
    try:
        shape = model.kv_layers, size.num_blocks, size.block_size
        return KVCache(*shape, model.kv_dtype, model.device, model.kept_hidden, shared, groups.of_layers)
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_memory_shortage(error):
            raise
        raise shortage from error
