"""The memory for caches is divided among blocks, slots of states and copies of these, within what is configured."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.adapters import AdapterSource
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.core.kv_groups import ONE_GROUP, KVGroups
from engine.model.cache_sizes import MAX_DEFAULT_KV_BYTES, CacheMemory, CacheSizes, cache_sizes, memory_for_caches


def sizes_of(memory: CacheMemory, length: int, groups: KVGroups = ONE_GROUP, **settings: Any) -> CacheSizes:
    config = EngineConfig(model="", max_num_seqs=4, **settings)
    return cache_sizes(config, config.limits_on("cpu"), length, memory, groups)


def test_a_share_of_the_free_memory_is_for_caches_unless_it_is_configured(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(1000))
    config = EngineConfig(model="", adapters=(AdapterSource("a", str(tmp_path)),))
    assert memory_for_caches(config, "cuda", 11_000) == 9000 and memory_for_caches(config, "cpu", 11_000) == 5000
    assert memory_for_caches(config, "cpu", 1 << 40) == MAX_DEFAULT_KV_BYTES
    assert memory_for_caches(EngineConfig(model="", kv_cache_bytes=12_345), "cpu", 100) == 12_345


@given(st.integers(0, 10**6), st.sampled_from([0, 100, 3000]), st.sampled_from([0, 700]), st.integers(1, 500))
def test_what_is_allocated_fits(num_bytes: int, state_bytes: int, block_bytes: int, max_model_len: int) -> None:
    try:
        sizes = sizes_of(CacheMemory(num_bytes, state_bytes, block_bytes), max_model_len)
    except ConfigError:
        assert num_bytes < 2 * block_bytes + state_bytes
        return
    assert 1 <= sizes.max_model_len <= min(max_model_len, 16 * sizes.num_blocks)
    assert sizes.num_blocks <= 4 * -(-max_model_len // 16)  # no more than can be used
    taken = sizes.num_blocks * block_bytes + sizes.num_slots * state_bytes
    assert taken <= num_bytes or (sizes.num_slots == 1 and not block_bytes)
    assert sizes.num_copies * state_bytes <= num_bytes // 8
    assert (sizes.num_slots > 0) == (state_bytes > 0)


def test_slots_of_states_take_at_most_half() -> None:
    assert sizes_of(CacheMemory(16_000, 2000, 100), 64).num_slots == 4
    assert sizes_of(CacheMemory(8000, 2000, 100), 64).num_slots == 2


def test_copies_of_states_are_as_many_as_configured_and_none_without_a_prefix_cache() -> None:
    memory = CacheMemory(80_000, 1000, 100)
    assert sizes_of(memory, 64).num_copies == 10
    assert sizes_of(memory, 64, state_cache_bytes=3999).num_copies == 3
    assert sizes_of(memory, 64, enable_prefix_caching=False).num_copies == 0


def test_configured_memory_is_used_up_and_configured_blocks_are_exact() -> None:
    assert sizes_of(CacheMemory(10_050, 0, 100), 64, kv_cache_bytes=10_050).num_blocks == 100
    assert sizes_of(CacheMemory(10_050, 0, 100), 64, num_blocks=7).num_blocks == 7


def test_windowed_groups_have_blocks_of_their_own() -> None:
    assert sizes_of(CacheMemory(10**6, 0, 100), 64, KVGroups((0, 1), 2, 16)).num_blocks == 4 * 2 * 4


@pytest.mark.parametrize(("settings", "flag"), [({"num_blocks": 3}, "--num-gpu-blocks"), ({}, "--kv-cache-memory")])
def test_a_configured_context_must_fit_and_the_models_own_is_lowered(settings: dict[str, int], flag: str) -> None:
    memory = CacheMemory(300, 0, 100)
    assert sizes_of(memory, 64, **settings).max_model_len == 48
    with pytest.raises(ConfigError, match=f"room for 48 tokens, less than a context of 64: give it more with {flag}"):
        sizes_of(memory, 64, max_model_len=64, **settings)
