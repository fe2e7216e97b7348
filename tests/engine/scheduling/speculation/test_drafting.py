"""Engines with a draft model: their steps, blocks, times and counts."""

from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import Batch, Phase, StepOutput
from engine.scheduling.speculation.draft_verification import with_draft_token
from tests.engine.fakes import add, batches, expected_tokens, run_to_end, tokens_of
from tests.engine.scheduling.speculation import timed
from tests.engine.scheduling.speculation.timed import PASS_S, STEP_S, TimedRunner, drafting_engine


@given(pattern=st.lists(st.booleans(), min_size=1, max_size=7), block_size=st.integers(1, 5), seed=st.integers(0, 99))
def test_requests_get_their_tokens_whatever_the_draft_model_proposes(
    pattern: list[bool], block_size: int, seed: int
) -> None:
    """The runner checks every read: KV that the draft model wrote is never read as the model's."""
    turns = count()
    runner = TimedRunner(block_size, errs=lambda: pattern[next(turns) % len(pattern)])
    engine = drafting_engine(runner, num_blocks=-(-40 // block_size), max_prefill_tokens_per_gap=4)
    prompts = {str(index): [1 + (seed + index) % 3] * (1 + index) for index in range(4)}
    for name, prompt in prompts.items():
        add(engine, name, prompt, max_tokens=12)
    updates = run_to_end(engine)
    for name, prompt in prompts.items():
        assert tokens_of(updates[name]) == expected_tokens(prompt, 12)
    assert engine._scheduler.stats.pool.held == 0


def test_accepted_drafts_save_steps_and_all_are_counted_and_timed() -> None:
    engine = drafting_engine(TimedRunner(4))
    add(engine, "a", max_tokens=60)
    steps = []
    while engine.has_work:
        steps.append(engine.step().stats)
    ran = [request for batch in batches(engine) for request in batch.requests]
    assert len(steps) < 30
    assert steps[-1].num_drafts == sum(request.num_drafts for request in ran)
    assert steps[-1].num_accepted_drafts == 60 - len(steps)
    for stats, request in zip(steps, ran, strict=True):
        assert (stats.drafting_s > 0) == (request.num_wanted > 0)
        assert stats.floor_s == pytest.approx(1e-12 * (1 + request.num_drafts))


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_are_allocated_for_wanted_draft_tokens(block_size: int) -> None:
    engine = drafting_engine(TimedRunner(block_size))
    add(engine, "a", max_tokens=40)
    run_to_end(engine)
    counts = [batch.num_drafts for batch in batches(engine)]
    assert counts[-6:-1] == [3] * 5
    assert engine._scheduler.stats.pool.held == 0


def test_the_time_of_passes_is_measured() -> None:
    class Slow(TimedRunner):
        def draft(self, batch: Batch) -> Batch:
            self.now_s += STEP_S
            return super().draft(batch)

    engine = drafting_engine(Slow(4))
    add(engine, "a", max_tokens=90)
    run_to_end(engine)
    assert sum(batch.num_drafts for batch in batches(engine)) == 4  # to learn that they do not pay


def test_the_step_after_a_prefill_wants_no_drafts() -> None:
    engine = drafting_engine(TimedRunner(4), max_prefill_tokens_per_gap=4)
    add(engine, "a", max_tokens=60)
    while sum(batch.num_drafts for batch in batches(engine)) < 9:
        engine.step()
    add(engine, "b", range(1, 30), max_tokens=2)
    run_to_end(engine)
    after = [step for before, step in pairwise(batches(engine)) if before.phase is Phase.PREFILL]
    assert len(after) > 3
    assert all(step.num_drafts == 0 for step in after)


def test_a_draft_model_that_finds_no_token_does_no_harm() -> None:
    """Neither to its request nor to one beside it that does not speculate."""

    class Silenced(TimedRunner):
        def draft(self, batch: Batch) -> Batch:
            self.now_s += PASS_S
            return replace(batch, requests=tuple(with_draft_token(request, None) for request in batch.requests))

    engine = drafting_engine(Silenced(4))
    add(engine, "a", max_tokens=20)
    add(engine, "b", [7], max_tokens=9, output_token_ids=expected_tokens([7], 2))
    updates = run_to_end(engine)
    assert tokens_of(updates["a"]) == expected_tokens([1, 2, 3], 20)
    assert tokens_of(updates["b"]) == expected_tokens([7], 9)[2:]


def test_a_draft_model_that_raises_ends_the_requests_of_its_step_only() -> None:
    class Broken(TimedRunner):
        def draft(self, batch: Batch) -> Batch:
            raise RuntimeError("broken")

    engine = drafting_engine(Broken(4))
    add(engine, "a", max_tokens=20)
    [*_, last] = run_to_end(engine)["a"]
    assert last.error is not None and "broken" in last.error
    add(engine, "b", max_tokens=2)
    assert tokens_of(run_to_end(engine)["b"]) == expected_tokens([1, 2, 3], 2)


class Lengthening(TimedRunner):
    """A runner whose steps and passes take longer with longer contexts, so that one without requests seems to take no
    time."""

    def _run(self, batch: Batch) -> StepOutput:
        self.now_s += 1e-6 * sum(request.end for request in batch.requests) ** 2
        return super()._run(batch)

    def draft(self, batch: Batch) -> Batch:
        drafted = super().draft(batch)
        self.now_s += 1e-7 * sum(request.num_drafts * request.end**2 for request in drafted.requests)
        return drafted


def test_a_step_without_requests_plans_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEP_S", "TOKEN_S", "PASS_S"):
        monkeypatch.setattr(timed, name, 0.0)
    engine = drafting_engine(Lengthening(4), num_speculative_tokens=4, target_itl_ms=1000)
    add(engine, "a", max_tokens=60)
    run_to_end(engine)
    add(engine, "b")
    engine.abort_requests(["b"])
    assert engine.step().updates == []
