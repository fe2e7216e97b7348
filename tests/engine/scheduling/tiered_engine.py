"""A fake engine with a KV store that is a dict."""

from typing import Any

from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.core.kv_groups import ONE_GROUP, KVGroups
from engine.core.messages import RequestUpdate
from engine.engine import Engine
from engine.scheduling.kv_tiers import TieredKVAllocator
from tests.clock import Clock
from tests.engine.fakes import FakeRunner, fake_info
from tests.engine.scheduling.fake_store import Content, FakeStore

PROMPT = list(range(1, 14))
"""Three full blocks of four, and one token."""


def engine_with_store(
    stored: dict[bytes, Content] | None = None,
    num_blocks: int = 32,
    clock: Any = None,
    num_state_checkpoints: int | None = None,
    groups: KVGroups = ONE_GROUP,
    **settings: Any,
) -> tuple[Engine, FakeStore, FakeRunner]:
    """Returns an engine of a model that has states if there are `num_state_checkpoints`."""
    runner = FakeRunner(4, groups=groups)
    store = FakeStore(runner, stored)
    config = EngineConfig(model="fake", block_size=4, num_speculative_tokens=0, **settings)
    slots = {} if num_state_checkpoints is None else {"num_state_slots": 4}
    info = fake_info(num_blocks, 4, num_state_checkpoints=num_state_checkpoints or 0, kv_groups=groups, **slots)
    engine = assemble(config, info, runner, clock=clock or Clock(), store=store)
    tiers_of(engine)._read_s = tiers_of(engine)._read_states_s = 0.0  # computing takes no time by this clock, either
    return engine, store, runner


def tiers_of(engine: Engine) -> TieredKVAllocator:
    tiers = engine._scheduler._kv
    assert isinstance(tiers, TieredKVAllocator)
    return tiers


def num_cached(updates: list[RequestUpdate]) -> int:
    assert updates[0].first is not None
    return updates[0].first.num_cached_tokens
