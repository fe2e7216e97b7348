"""Which requests the scheduler runs, with how many tokens and in which order, over a runner that checks every read."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.batch import Phase
from engine.core.prompt_logprobs import PromptLogprobs
from engine.core.request import FinishReason
from engine.engine import Engine
from tests.engine.fakes import add, batches, expected_tokens, fake_engine, run_to_end, tokens_of


def phases(engine: Engine) -> list[Phase]:
    return [batch.phase for batch in batches(engine)]


def test_a_request_gets_the_tokens_of_its_own_context() -> None:
    engine = fake_engine()
    add(engine, "a", [3, 1, 4, 1, 5], max_tokens=9)
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == expected_tokens([3, 1, 4, 1, 5], 9)
    assert [update.finish_reason for update in updates] == [None] * 8 + [FinishReason.LENGTH]


def test_between_two_decode_steps_at_most_one_prefill_step_runs_and_within_its_budget() -> None:
    engine = fake_engine(max_prefill_tokens_per_gap=6, max_num_batched_tokens=100)
    add(engine, "decoder", max_tokens=30)
    engine.step()
    for name in "bcd":
        add(engine, name, range(1, 20), max_tokens=2)
    run_to_end(engine)
    while_decoding = batches(engine)[1:25]
    assert any(batch.phase is Phase.PREFILL for batch in while_decoding)
    for batch, following in pairwise(while_decoding):
        if batch.phase is Phase.PREFILL:
            assert batch.num_tokens <= 6 and following.phase is Phase.DECODE


def test_with_nothing_decoding_prefill_takes_its_full_budget() -> None:
    engine = fake_engine(max_prefill_tokens_per_gap=2, max_num_batched_tokens=10)
    add(engine, "a", range(1, 9))
    add(engine, "b", range(1, 9))
    engine.step()
    assert [len(request.token_ids) for request in batches(engine)[0].requests] == [8, 2]


def test_a_chunk_in_progress_goes_on_before_new_requests_are_admitted() -> None:
    engine = fake_engine(max_num_batched_tokens=5)
    add(engine, "long", range(1, 13), max_tokens=1)
    engine.step()
    add(engine, "urgent", [1], max_tokens=1, priority=-5)
    engine.step()
    engine.step()
    ids = [[request.request_id for request in batch.requests] for batch in batches(engine)]
    assert ids == [["long"], ["long"], ["long", "urgent"]]


def test_waiting_requests_run_by_priority_then_arrival() -> None:
    engine = fake_engine(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        add(engine, name, priority=priority, max_tokens=1)
    run_to_end(engine)
    assert [batch.requests[0].request_id for batch in batches(engine)] == ["d", "b", "a", "c"]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    engine = fake_engine(max_num_seqs=3)
    for index in range(10):
        add(engine, str(index))
    run_to_end(engine)
    assert max(len(batch.requests) for batch in batches(engine)) == 3


def test_the_newest_is_preempted_and_still_gets_its_own_tokens() -> None:
    engine = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    for name in "ab":
        add(engine, name, [ord(name) % 50] * 3, max_tokens=8)
    updates = run_to_end(engine)
    for name in "ab":
        assert tokens_of(updates[name]) == expected_tokens([ord(name) % 50] * 3, 8)
    assert updates["a"][-1].num_preemptions == 0
    assert updates["b"][-1].num_preemptions > 0


def test_a_preempted_request_comes_back_before_later_ones() -> None:
    engine = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    for name in "abc":
        add(engine, name, [ord(name) % 50] * 3, max_tokens=8)
    ends: list[str] = []
    while engine.has_work:
        ends += [update.request_id for update in engine.step().updates if update.finish_reason]
    assert ends == ["a", "b", "c"]
    assert any(request.start == 0 for batch in batches(engine)[3:] for request in batch.requests)


def test_preemptions_are_counted_and_the_queue_time_ends_at_the_first_schedule() -> None:
    engine = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    for name in "ab":
        add(engine, name, [ord(name) % 50] * 3, max_tokens=8)
    requests = dict(engine._scheduler._requests)
    last = engine.step()
    scheduled_s = requests["b"].first_scheduled_s
    while engine.has_work:
        last = engine.step()
    assert requests["b"].first_scheduled_s == scheduled_s
    assert last.stats.num_preemptions == requests["b"].num_preemptions > 0


def test_requests_that_run_for_the_first_time_are_named_once() -> None:
    engine = fake_engine(num_blocks=6, block_size=2, enable_prefix_caching=False)
    for name in "ab":
        add(engine, name, [ord(name) % 50] * 3, max_tokens=8)
    named: list[list[str]] = []
    while engine.has_work:
        engine.step(named.append)
    assert engine._scheduler.stats.num_preemptions > 0
    assert named == [["a", "b"]]


def test_newly_scheduled_requests_are_reported_before_the_step_runs() -> None:
    engine = fake_engine()
    add(engine, "a")
    num_run: list[int] = []
    engine.step(lambda _: num_run.append(len(batches(engine))))
    assert num_run == [0]


def test_prefix_lookups_and_hits_are_counted_in_tokens() -> None:
    engine = fake_engine(block_size=4)
    for name in "ab":
        add(engine, name, range(1, 10), max_tokens=1)
        run_to_end(engine)
    assert (engine._scheduler.stats.prefix_queries, engine._scheduler.stats.prefix_hits) == (18, 8)


def test_what_is_not_looked_up_is_not_counted() -> None:
    scored, off = fake_engine(block_size=4), fake_engine(block_size=4, enable_prefix_caching=False)
    add(scored, "a", range(1, 10), max_tokens=1, prompt_logprobs=1)
    add(off, "a", range(1, 10), max_tokens=1)
    for engine in (scored, off):
        run_to_end(engine)
        assert engine._scheduler.stats.prefix_queries == 0


def test_a_full_prefix_hit_still_computes_one_token() -> None:
    engine = fake_engine(block_size=4)
    for name in "ab":
        add(engine, name, range(1, 9), max_tokens=1)
        updates = run_to_end(engine)
    first = updates["b"][0].first
    assert first is not None and first.num_cached_tokens == 7
    assert [len(batch.requests[0].token_ids) for batch in batches(engine)] == [8, 1]


def test_only_equal_salts_share_a_prefix() -> None:
    engine = fake_engine(block_size=4)
    hits = []
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        add(engine, name, range(1, 9), max_tokens=1, cache_salt=salt)
        first = run_to_end(engine)[name][0].first
        assert first is not None
        hits.append(first.num_cached_tokens)
    assert hits == [0, 0, 7]


def test_a_request_that_scores_its_prompt_takes_no_prefix_hits() -> None:
    engine = fake_engine(block_size=4)
    add(engine, "a", range(1, 9), max_tokens=1)
    run_to_end(engine)
    add(engine, "b", range(1, 9), max_tokens=1, prompt_logprobs=0)
    first = run_to_end(engine)["b"][0].first
    assert first is not None and first.num_cached_tokens == 0


def test_a_prompt_is_scored_once_even_if_preempted_on_the_way() -> None:
    engine = fake_engine(
        num_blocks=8, block_size=2, max_num_batched_tokens=4, max_prefill_tokens_per_gap=1, enable_prefix_caching=False
    )
    add(engine, "older", [1, 2], max_tokens=10)
    engine.step()
    add(engine, "scored", range(1, 11), max_tokens=1, prompt_logprobs=0)
    (update,) = run_to_end(engine)["scored"]
    assert update.num_preemptions > 0 and update.first is not None and update.first.prompt_logprobs is not None
    scores = [*PromptLogprobs(update.first.prompt_logprobs)][1:]
    assert [score.token_id for score in scores] == list(range(2, 11))


def test_admission_spares_a_block_for_each_running_request() -> None:
    engine = fake_engine(num_blocks=7, block_size=4)
    for name in "abc":
        add(engine, name, range(1, 9), max_tokens=1)
    assert engine.step().stats.num_waiting == 1


def test_a_block_is_taken_with_its_first_token_and_not_before() -> None:
    engine = fake_engine(block_size=2)
    add(engine, "a", [1, 2], max_tokens=9)
    assert [engine.step().stats.pool.held for _ in range(5)] == [1, 2, 2, 3, 3]


def test_max_tokens_zero_ends_after_the_prompt_without_a_token() -> None:
    engine = fake_engine(max_num_batched_tokens=2)
    add(engine, "a", [1, 2, 3], max_tokens=0)
    (update,) = run_to_end(engine)["a"]
    assert not update.token_ids and update.finish_reason is FinishReason.LENGTH
    assert update.first is not None and update.first.num_prefill_chunks == 2


def test_a_stop_token_ends_the_request_and_is_reported() -> None:
    tokens = expected_tokens([7, 7], 10)
    engine = fake_engine()
    add(engine, "a", [7, 7], max_tokens=10, stop_token_ids=(tokens[4],))
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == tokens[: tokens.index(tokens[4]) + 1]
    assert (updates[-1].finish_reason, updates[-1].stop_token_id) == (FinishReason.STOP, tokens[4])


def find_prompt_with_eos(limit: int) -> tuple[list[int], int]:
    for start in range(1, 50):
        tokens = expected_tokens([start], limit)
        if 0 in tokens[:-1]:
            return [start], tokens.index(0)
    raise AssertionError("no prompt leads to EOS")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_the_request_unless_ignored(ignore_eos: bool) -> None:
    prompt, index = find_prompt_with_eos(40)
    engine = fake_engine()
    add(engine, "a", prompt, max_tokens=40, ignore_eos=ignore_eos)
    updates = run_to_end(engine)["a"]
    assert len(tokens_of(updates)) == (40 if ignore_eos else index + 1)
    assert updates[-1].stop_token_id is None


@pytest.mark.parametrize(("late", "stops"), [(0, True), (1, False)])
def test_a_stop_counts_from_min_tokens_on(late: int, stops: bool) -> None:
    prompt, index = find_prompt_with_eos(40)
    engine = fake_engine()
    add(engine, "a", prompt, max_tokens=40, ignore_eos=False, min_tokens=index + 1 + late)
    assert (len(tokens_of(run_to_end(engine)["a"])) == index + 1) == stops


def test_a_resumed_request_goes_on_where_it_stopped() -> None:
    tokens = expected_tokens([5, 6, 7], 12)
    engine = fake_engine()
    add(engine, "a", [5, 6, 7], max_tokens=12, output_token_ids=tokens[:5])
    updates = run_to_end(engine)["a"]
    assert tokens_of(updates) == tokens[5:]
    assert all(update.first is None for update in updates)  # it was announced by the engine that began it


def test_a_resumed_request_whose_kv_is_cached_decodes_at_once() -> None:
    engine = fake_engine(block_size=2)
    add(engine, "a", [5, 6, 7], max_tokens=2)
    tokens = tokens_of(run_to_end(engine)["a"])
    add(engine, "b", [5, 6, 7], max_tokens=3, output_token_ids=tokens)
    assert tokens_of(run_to_end(engine)["b"]) == expected_tokens([5, 6, 7], 3)[2:]
    assert phases(engine)[-1] is Phase.DECODE


def test_blocks_to_copy_are_held_while_a_step_of_others_comes_first() -> None:
    engine, prompt = fake_engine(), range(1, 8)
    add(engine, "before", prompt, max_tokens=6)
    tokens = tokens_of(run_to_end(engine)["before"])
    add(engine, "resumed", prompt, max_tokens=6, output_token_ids=tokens[:4])
    add(engine, "prefill", range(20, 30))
    engine.step()
    ((source, _),) = engine._scheduler._requests["resumed"].block_copies
    engine.reset_prefix_cache(clears_store=False)
    assert engine._scheduler.kv._pool.ref_count(source) == 1
    assert tokens_of(run_to_end(engine)["resumed"]) == tokens[4:]
    assert engine._scheduler.stats.pool.held == 0


def test_the_first_token_is_announced_once() -> None:
    engine = fake_engine(max_num_batched_tokens=2)
    add(engine, "a", [1, 2, 3, 4, 5])
    updates = run_to_end(engine)["a"]
    assert updates[0].first is not None and updates[0].first.num_prefill_chunks == 3
    assert all(update.first is None for update in updates[1:])


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 4, 16]),
    chunk=st.integers(1, 20),
    gap=st.integers(1, 20),
    caching=st.booleans(),
    spare=st.integers(0, 8),
)
def test_tokens_do_not_depend_on_how_the_work_was_scheduled(
    prompts: list[list[int]], block_size: int, chunk: int, gap: int, caching: bool, spare: int
) -> None:
    num_blocks = -(-max(len(prompt) + 6 for prompt in prompts) // block_size) + spare
    engine = fake_engine(
        num_blocks,
        block_size,
        max_num_batched_tokens=chunk,
        max_prefill_tokens_per_gap=gap,
        enable_prefix_caching=caching,
        max_num_seqs=4,
    )
    for index, prompt in enumerate(prompts):
        add(engine, str(index), prompt, max_tokens=6)
    updates = run_to_end(engine)
    for index, prompt in enumerate(prompts):
        assert tokens_of(updates[str(index)]) == expected_tokens(prompt, 6)
