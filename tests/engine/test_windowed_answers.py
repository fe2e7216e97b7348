"""Models whose layers see a window answer bit for bit as they do where all blocks are kept, and hold fewer blocks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core.config import EngineConfig
from engine.engine import Engine
from engine.runner.loaded_model import LoadedModel
from engine.runner.window_groups import window_groups
from engine.scheduling.kv_tiers import TieredKVAllocator
from tests.crossed import slow_but
from tests.engine.fakes import add, run_to_end
from tests.engine.model.always_drafting import let_always_draft
from tests.engine.tiny_models import tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWED = ("mistral", "gemma2", "gpt_oss", "olmo3")
"""Of which the first has no layer that sees everything."""
LONG = [token % 190 for token in range(3, 1500, 11)]
NUM_OUTPUT = 30


def answers(engine: Engine, *names: str, has_tenants: bool = False) -> list[Any]:
    """Returns token ids and log-probabilities of requests with long prompts, which begin alike but for the last."""
    for index, name in enumerate(names):
        prompt = LONG[: 100 + 7 * index] if index < 2 else [5, *LONG]
        tenant = name if has_tenants else ""
        add(engine, name, prompt, tenant=tenant, max_tokens=NUM_OUTPUT, logprobs=3, temperature=1.0, seed=index)
    updates = run_to_end(engine)
    return [[(item.token_id, item.logprob) for update in updates[name] for item in update.logprobs] for name in names]


@pytest.mark.parametrize("architecture", slow_but(WINDOWED, "mistral", "gpt_oss"))
def test_answers_are_the_same_with_drafts_of_the_models_own_weights(
    architecture: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    plain = tiny_model(architecture, "bfloat16")
    expected = answers(engine_of(plain, free_window_blocks=False, num_speculative_tokens=0), "a", "b", "c")
    engine = let_always_draft(engine_of(tiny_model(architecture, "bfloat16", "none", "int4")), 3)
    assert engine._scheduler.kv._tables.windowed
    assert answers(engine, "a", "b", "c") == expected
    assert engine._scheduler.stats.num_accepted_drafts > 0
    assert engine._scheduler.stats.pool.held == 0


@pytest.fixture(params=WINDOWED)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model(request.param)


def engine_of(model: LoadedModel, **settings: Any) -> Engine:
    return tiny_engine(model, **{"block_size": 4, "max_num_batched_tokens": 24, **settings})


def test_answers_are_those_of_an_engine_that_keeps_all_blocks(model: LoadedModel) -> None:
    kept = engine_of(model, free_window_blocks=False)
    assert not kept._scheduler.kv._tables.windowed
    expected = answers(kept, "a", "b", "c")
    engine = engine_of(model)
    assert engine._scheduler.kv._tables.windowed
    assert answers(engine, "a", "b", "c") == expected
    hits = engine._scheduler.stats.prefix_hits
    assert answers(engine, "a", "b", "c") == expected
    assert engine._scheduler.stats.prefix_hits - hits >= 2 * (len(LONG) // 2), "all were found again"


@pytest.mark.parametrize("caching", [True, False])
def test_answers_are_the_same_where_requests_are_preempted(model: LoadedModel, caching: bool) -> None:
    """Three tenants take turns in one place, with blocks for no more than one request."""
    expected = answers(engine_of(model, free_window_blocks=False), "a", "b", "c")
    groups = window_groups(EngineConfig(model="tiny"), model)
    num_blocks = groups.num_blocks(len(LONG) + NUM_OUTPUT + 1, 4, 24)
    limits = {"max_num_seqs": 1, "num_blocks": -(-num_blocks // groups.num_groups)}
    engine = engine_of(model, enable_prefix_caching=caching, **limits)
    assert answers(engine, "a", "b", "c", has_tenants=True) == expected
    assert engine._scheduler.stats.num_preemptions > 0


def test_answers_are_the_same_after_a_kill(model: LoadedModel) -> None:
    """The next engine goes on with blocks in memory, and finds garbage in all others."""
    expected = answers(engine_of(model, free_window_blocks=False), "a", "b", "c")
    fd = os.memfd_create("kv")
    before = engine_of(model, kv_memory_fd=fd)
    answers(before, "a", "b", "c")
    kv, cache = before._scheduler.kv, before._runner._runner._cache
    for block in {*range(cache.num_blocks)} - {*kv._cache._hash_of_block}:
        for part in cache.block_bytes(block):
            part[:] = 0xFF
    engine = engine_of(model, kv_memory_fd=fd)
    os.close(fd)
    assert answers(engine, "a", "b", "c") == expected
    assert engine._scheduler.stats.prefix_hits > 2 * len(LONG)


def test_answers_are_the_same_after_a_restart_of_the_server(model: LoadedModel, tmp_path: Path) -> None:
    """The next engine finds nothing in memory, and reads of windowed layers what its next token sees."""
    expected = answers(engine_of(model, free_window_blocks=False), "a", "b", "c")
    before = engine_of(model, kv_store=str(tmp_path))
    assert before._scheduler.kv._tables.windowed
    answers(before, "a", "b", "c")
    before.close()
    engine = engine_of(model, kv_store=str(tmp_path))
    tiers = engine._scheduler.kv
    assert isinstance(tiers, TieredKVAllocator)
    tiers._read_s = 0.0  # a tiny model computes faster than files are read
    assert answers(engine, "a", "b", "c") == expected
    assert engine._scheduler.stats.prefix_disk_hits > len(LONG)
    assert engine._store.stats.store_damaged_files == 0
