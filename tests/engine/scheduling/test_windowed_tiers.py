"""Of a model whose layers see a window, the KV store is read as far as the next token sees."""

from collections.abc import Callable

import pytest

from engine.core.kv_groups import KVGroups, groups_of
from engine.core.messages import RequestUpdate
from tests.engine.fakes import add, expected_tokens, run_to_end
from tests.engine.scheduling.fake_store import Content
from tests.engine.scheduling.tiered_engine import engine_with_store, num_cached, tiers_of

PROMPT = list(range(1, 42))
"""Ten full blocks of four, and one token."""
LAST_OF_SECOND_GROUP = [*range(1, 41), -1]
"""What the last full block there holds at its end, in the fake engine."""
MIXED = groups_of([6, None, 6])
ALL = groups_of([6, 6])


@pytest.mark.parametrize(("groups", "num_read"), [(MIXED, 10 + 2 * 2), (ALL, 2)], ids=["mixed", "all"])
def test_the_next_engine_reads_what_its_token_sees(groups: KVGroups, num_read: int) -> None:
    before, store, _ = engine_with_store(num_blocks=60, groups=groups, max_num_batched_tokens=16)
    add(before, "a", PROMPT, max_tokens=1)
    run_to_end(before)
    assert len(store.stored) == 10 * groups.num_groups
    engine, store, _ = engine_with_store(store.stored, num_blocks=60, groups=groups)
    add(engine, "b", PROMPT, max_tokens=4)
    updates = run_to_end(engine)["b"]
    assert num_cached(updates) == 40
    assert [token for update in updates for token in update.token_ids] == expected_tokens(PROMPT, 4)
    assert engine._scheduler.stats.prefix_disk_hits == 40
    assert store.num_loads == num_read


def test_a_window_with_a_gap_is_no_prefix() -> None:
    """Without a block of the window the prefix ends before it, where the window before it is whole."""
    before, store, _ = engine_with_store(num_blocks=60, groups=MIXED, max_num_batched_tokens=16)
    add(before, "a", PROMPT, max_tokens=1)
    run_to_end(before)
    (lost,) = [name for name, content in store.stored.items() if [*content[-1]] == LAST_OF_SECOND_GROUP]
    del store.stored[lost]
    engine, _, _ = engine_with_store(store.stored, num_blocks=60, groups=MIXED)
    add(engine, "b", PROMPT, max_tokens=4)
    assert num_cached(run_to_end(engine)["b"]) == 36


def handed_over(groups: KVGroups, is_stored: Callable[[Content], bool] = lambda _: True) -> int:
    """Returns how many of the prompt's tokens are told stored, once all writes have ended, of which some may fail."""
    engine, store, _ = engine_with_store(num_blocks=60, groups=groups, max_num_batched_tokens=16)
    store.is_held_up = True
    add(engine, "a", PROMPT, max_tokens=1, until_stored=True)
    told = list[RequestUpdate]()
    while store.under_way or engine.has_work:
        told += engine.step().updates if engine.has_work else []
        if store.under_way:
            assert not [update for update in told if update.finish_reason]
            store.end(succeeded=is_stored(store._contents[store.under_way[0]]))
    (last,) = [update for update in told if update.finish_reason]
    return last.num_stored_tokens


@pytest.mark.parametrize("groups", [MIXED, ALL], ids=["mixed", "all"])
def test_a_prefix_is_told_stored_once_all_groups_have_it(groups: KVGroups) -> None:
    assert handed_over(groups) == 40


def test_a_prefix_that_one_group_could_not_store_is_told_shorter() -> None:
    assert handed_over(MIXED, lambda content: [*content[-1]] != LAST_OF_SECOND_GROUP) == 36


def test_what_is_dropped_is_dropped_in_the_store_in_all_groups() -> None:
    engine, store, _ = engine_with_store(num_blocks=60, groups=MIXED, max_num_batched_tokens=16)
    add(engine, "a", PROMPT, max_tokens=1)
    run_to_end(engine)
    engine.drop_prefixes("", None)
    assert store.stored == {}


def test_what_is_in_memory_alone_completes_what_is_stored() -> None:
    engine, store, _ = engine_with_store(num_blocks=60, groups=MIXED, max_num_batched_tokens=16)
    add(engine, "a", PROMPT, max_tokens=1)
    run_to_end(engine)
    tiers = tiers_of(engine)
    first_group = [*range(1, 41)]
    store.stored = {name: content for name, content in store.stored.items() if [*content[-1]] == first_group}
    (name,) = store.stored
    tiers._pool.drop([tiers._hashed.block_of(name)])
    add(engine, "b", PROMPT, max_tokens=1)
    assert num_cached(run_to_end(engine)["b"]) == 40 and store.num_loads == 1
