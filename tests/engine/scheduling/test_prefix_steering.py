"""A tenant sees, retains and drops what its own requests left in the cache, by key; no answer depends on it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.cache_steering import CachedPrefixes, CacheSteering
from engine.engine import Engine
from engine.scheduling.cache_keys import CacheKeys
from engine.scheduling.prefill_budget import PrefillPace
from tests.clock import Clock
from tests.engine.fakes import add, expected_tokens, fake_engine, run_to_end, tokens_of
from tests.engine.scheduling.tiered_engine import PROMPT, engine_with_store, num_cached

OTHER = [*PROMPT[:8], 40, 41, 42, 43, 44]
"""Its first two blocks are those of PROMPT."""


def run(engine: Engine, name: str, prompt: list[int] = PROMPT, **fields: Any) -> int:
    """Runs a request for one token, and returns how much of its prompt was cached."""
    steering = {each: fields.pop(each) for each in ("key", "retain_s", "stays_in_memory") if each in fields}
    add(engine, name, prompt, max_tokens=1, steering=CacheSteering(**steering), **fields)
    updates = run_to_end(engine)[name]
    assert tokens_of(updates) == expected_tokens(prompt, 1)
    return num_cached(updates)


def tokens_by_key(engine: Engine, tenant: str = "") -> dict[str, int]:
    return {each.key: each.num_tokens for each in engine.cached_prefixes(tenant)}


def test_what_ended_requests_left_is_counted_by_key() -> None:
    clock = Clock()
    engine = fake_engine(clock=clock)
    run(engine, "a", key="x")
    run(engine, "b", OTHER, key="y", retain_s=60.0)
    run(engine, "c", [1, 2, 3], key="short")
    clock.now_s += 5.0
    x, y = engine.cached_prefixes("")
    assert x == CachedPrefixes("x", 12, 12, 0, 8, 5.0, 55.0)
    assert y == CachedPrefixes("y", 12, 12, 0, 12, 5.0, 55.0)
    clock.now_s += 60.0
    assert engine.cached_prefixes("")[1] == CachedPrefixes("y", 12, 12, 0, 0, 65.0, 0.0)


def test_answers_count_and_only_what_was_computed_does() -> None:
    engine = fake_engine(max_num_batched_tokens=4)
    add(engine, "a", PROMPT, max_tokens=8, steering=CacheSteering("x"))
    engine.step()
    assert tokens_by_key(engine) == {}
    engine.abort_requests(["a"])
    assert tokens_by_key(engine) == {"x": 4}
    add(engine, "b", PROMPT, max_tokens=8, steering=CacheSteering("x"))
    run_to_end(engine)
    assert tokens_by_key(engine) == {"x": 20}


def test_a_tenant_sees_its_own_keys() -> None:
    engine = fake_engine()
    run(engine, "a", key="x", tenant="alice", cache_salt="alice")
    run(engine, "b", key="x", tenant="bob", cache_salt="bob")
    run(engine, "c", OTHER, tenant="bob", cache_salt="bob")
    assert tokens_by_key(engine, "alice") == {"x": 12} and tokens_by_key(engine, "bob") == {"x": 12, "": 12}
    assert tokens_by_key(engine, "") == {}


def test_what_made_room_is_no_longer_counted() -> None:
    engine = fake_engine(num_blocks=5)
    run(engine, "a", key="x")
    run(engine, "b", [*range(20, 36)], key="y")
    assert tokens_by_key(engine) == {"x": 4, "y": 16}


def test_a_retained_prompt_is_there_when_others_made_room() -> None:
    for retain_s, cached in ((0.0, 0), (60.0, 12)):
        engine = fake_engine(num_blocks=8, clock=Clock())
        run(engine, "a", retain_s=retain_s)
        for number in range(3):
            run(engine, f"other {number}", [20 + number, *range(30, 46)])
        assert run(engine, "b") == cached


def test_no_more_than_its_share_of_the_pool_is_retained() -> None:
    engine = fake_engine(num_blocks=8, clock=Clock(), prefix_retention_share=0.25)
    run(engine, "a", retain_s=60.0)
    assert engine.cached_prefixes("")[0].num_retained_tokens == 8
    run(engine, "b", [20, *range(30, 46)])
    run(engine, "c", [21, *range(30, 46)])
    assert run(engine, "d") == 8


def test_a_retained_prompt_is_no_reason_to_refuse_or_preempt() -> None:
    engine = fake_engine(num_blocks=6, clock=Clock(), prefix_retention_share=1.0)
    run(engine, "a", [*range(1, 25)][:23], retain_s=60.0)
    run(engine, "b", [*range(20, 43)])
    assert engine._scheduler.stats.num_preemptions == 0


def test_dropping_a_key_leaves_what_another_used() -> None:
    engine = fake_engine()
    run(engine, "a", key="x")
    run(engine, "b", OTHER, key="y")
    engine.drop_prefixes("", "x")
    assert tokens_by_key(engine) == {"y": 12} and engine._scheduler.stats.pool.cached == 3
    assert run(engine, "c") == 8


@pytest.mark.parametrize(("tenant", "key"), [("bob", "x"), ("bob", None), ("alice", "y"), ("", None)])
def test_another_tenant_or_key_drops_nothing(tenant: str, key: str | None) -> None:
    engine = fake_engine()
    run(engine, "a", key="x", tenant="alice")
    engine.drop_prefixes(tenant, key)
    assert tokens_by_key(engine, "alice") == {"x": 12} and run(engine, "b") == 12


def test_all_keys_can_be_dropped_while_a_request_runs() -> None:
    engine = fake_engine()
    run(engine, "a", key="x", retain_s=60.0)
    run(engine, "b", OTHER)
    add(engine, "running", PROMPT, max_tokens=9)
    engine.step()
    engine.drop_prefixes("", None)
    assert tokens_by_key(engine) == {} and engine._scheduler.stats.pool.cached == 0
    assert tokens_of(run_to_end(engine)["running"]) == expected_tokens(PROMPT, 9)[1:]
    stats = engine._scheduler.stats.pool
    assert (stats.held, stats.free + stats.cached) == (0, 64)


def test_dropped_blocks_leave_the_kv_store_too() -> None:
    engine, store, _ = engine_with_store()
    run(engine, "a", key="x")
    run(engine, "b", OTHER, key="y")
    assert len(store.stored) == 4
    engine.drop_prefixes("", "x")
    assert len(store.stored) == 3
    assert [(each.key, each.num_stored_tokens) for each in engine.cached_prefixes("")] == [("y", 12)]


def test_what_is_in_the_kv_store_alone_is_counted() -> None:
    engine, _, _ = engine_with_store()
    run(engine, "a", key="x")
    engine.reset_prefix_cache(clears_store=False)
    assert engine.cached_prefixes("")[0] == CachedPrefixes("x", 12, 0, 12, 0, 0.0, 0.0)
    engine.drop_prefixes("", "x")
    assert engine.cached_prefixes("") == [] and run(engine, "b") == 0


def test_what_is_being_read_is_dropped() -> None:
    engine, store, _ = engine_with_store()
    run(engine, "a", key="x")
    engine.reset_prefix_cache(clears_store=False)
    store.is_held_up = True
    add(engine, "b", PROMPT, max_tokens=1)
    engine.step()
    engine.drop_prefixes("", "x")
    store.stored |= {each.name: store._contents.get(each.block_id, []) for each in store.under_way}
    store.is_held_up = False
    assert num_cached(run_to_end(engine)["b"]) == 0


def test_what_stays_in_memory_is_not_stored() -> None:
    engine, store, _ = engine_with_store()
    run(engine, "a", stays_in_memory=True)
    assert store.stored == {} and run(engine, "b", stays_in_memory=True) == 12
    run(engine, "c", [9, *PROMPT])
    assert len(store.stored) == 3


def test_the_prefill_that_hits_save_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillPace, "saving", lambda _, num_tokens: num_tokens / 4)
    engine = fake_engine()
    run(engine, "a")
    assert engine._scheduler.stats.prefill_saved_s == 0.0
    run(engine, "b")
    run(engine, "c", OTHER)
    assert engine._scheduler.stats.prefill_saved_s == (12 + 8) / 4


def test_without_a_prefix_cache_there_is_nothing_to_steer() -> None:
    engine = fake_engine(enable_prefix_caching=False)
    assert run(engine, "a", key="x", retain_s=60.0) == run(engine, "b", key="x") == 0
    engine.drop_prefixes("", None)
    assert engine.cached_prefixes("") == []


uses = st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(1, 6), st.integers(0, 3))


@given(st.lists(uses | st.tuples(st.sampled_from("ab"), st.sampled_from("xy") | st.none()), max_size=30))
def test_keys_against_a_plain_model(operations: list[tuple[Any, ...]]) -> None:
    """The model: a list of the newest uses. `use` gets blocks from a first one on."""
    keys, model = CacheKeys(8), list[tuple[str, str, bytes]]()
    for operation in operations:
        tenant, key, *blocks = operation
        if blocks:
            hashes = [bytes([block]) for block in range(blocks[0], blocks[0] + blocks[1])]
            keys.use(tenant, key, hashes, 0.0)
            new = [(tenant, key, each) for each in reversed(hashes)]
            model = [*(each for each in model if each not in new), *new][-8:]
        else:
            gone = [each for each in model if each[0] == tenant and key in (None, each[1])]
            model = [each for each in model if each not in gone]
            alone = {each[2] for each in gone} - {each[2] for each in model}
            assert sorted(keys.forget(tenant, key)) == sorted(alone)
        found = {
            (tenant, key, block) for tenant in "ab" for key, use in keys.uses_of(tenant) for block in use.block_hashes
        }
        assert found == set(model)
