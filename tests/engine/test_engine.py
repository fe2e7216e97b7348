"""The engine's steps: failures end their own requests, aborts are reported, and traces and floors are written."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.assembly import assemble
from engine.core.batch import Batch, RequestStepOutput, StepOutput
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, DeviceFailedError
from engine.core.machine import Ceilings
from engine.core.request import FinishReason
from engine.core.stats import RequestTimings
from engine.engine import Engine
from engine.scheduling.cost.step_trace import FileTracer, NullTracer, check_trace_file, open_tracer
from tests.engine.fakes import FakeRunner, add, expected_tokens, fake_engine, fake_info, run_to_end, tokens_of


class BreaksOnce(FakeRunner):
    def decode(self, batch: Batch) -> StepOutput:
        if not any(batch.phase == "decode" for batch in self.batches):
            self.batches.append(batch)
            raise RuntimeError("no more memory")
        return super().decode(batch)


def engine_with(runner: FakeRunner, **fields: Any) -> Engine:
    return assemble(EngineConfig(model="fake", block_size=4), fake_info(64, 4), runner, **fields)


def test_a_step_that_raises_ends_its_own_requests_and_no_others() -> None:
    engine = engine_with(BreaksOnce(4))
    add(engine, "victim")
    engine.step()
    engine.step()
    add(engine, "later")
    updates = run_to_end(engine)
    assert tokens_of(updates["later"]) == expected_tokens([1, 2, 3], 5)
    assert engine._scheduler.stats.pool.held == 0


def test_a_failed_request_says_why() -> None:
    engine = engine_with(BreaksOnce(4))
    add(engine, "victim")
    engine.step()
    failed = engine.step()
    (update,) = failed.updates
    assert update.finish_reason is FinishReason.ERROR and "no more memory" in (update.error or "")
    assert (failed.stats.model_s, failed.stats.floor_s, failed.stats.bound) == (0.0, None, None)


class LosesTheDevice(FakeRunner):
    def prefill(self, batch: Batch) -> StepOutput:
        raise DeviceFailedError("an illegal memory access")


def test_a_lost_device_ends_the_engine_and_not_its_requests() -> None:
    engine = engine_with(LosesTheDevice(4))
    add(engine, "resumed by another process")
    with pytest.raises(DeviceFailedError, match="illegal memory"):
        engine.step()


def test_steps_count_the_tokens_that_they_generate() -> None:
    engine = engine_with(FakeRunner(4))
    for name in "ab":
        add(engine, name, max_tokens=5)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert sum(step.stats.num_generated for step in steps) == 10
    assert [step.stats.num_generated for step in steps] == [
        sum(len(update.token_ids) for update in step.updates) for step in steps
    ]


def test_the_step_after_an_abort_knows_of_it() -> None:
    """Even if there is nothing to abort: who waits for that step must not wait for ever."""
    engine = engine_with(FakeRunner(4))
    add(engine, "a")
    engine.step()
    engine.abort_requests(["a", "unknown"])
    assert engine.has_work
    stats = engine.step().stats
    assert (stats.num_aborts, stats.num_running, stats.pool.held, stats.num_generated) == (2, 0, 0, 0)
    engine.abort_requests(["unknown"])
    assert engine.has_work and engine.step().stats.num_aborts == 3


class NoTokenRunner(FakeRunner):
    """A runner that samples no token: its logits are no numbers, or allow none."""

    is_finite = True

    def decode(self, batch: Batch) -> StepOutput:
        return StepOutput(
            tuple(RequestStepOutput(each.request_id, is_finite=self.is_finite) for each in batch.requests)
        )

    prefill = decode


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.05}, {"logit_bias": {1: -100.0}}], ids=str)
@pytest.mark.parametrize("is_finite", [False, True])
def test_a_request_is_blamed_only_for_numbers_that_it_changed(params: dict[str, Any], is_finite: bool) -> None:
    runner = NoTokenRunner(4)
    runner.is_finite = is_finite
    engine = engine_with(runner)
    add(engine, "a", **params)
    (update,) = run_to_end(engine)["a"]
    assert (update.finish_reason, update.blames_request) == (FinishReason.ERROR, is_finite)
    assert ("what it allows and forbids" in (update.error or "")) == is_finite
    assert engine._scheduler.stats.pool.held == 0


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"returns_embedding": True}], ids=str)
def test_logits_that_are_no_numbers_are_an_error_even_if_no_token_was_wanted(params: dict[str, Any]) -> None:
    for is_finite, reason in ((True, FinishReason.LENGTH), (False, FinishReason.ERROR)):
        runner = NoTokenRunner(4)
        runner.is_finite = is_finite
        engine = engine_with(runner)
        add(engine, "a", max_tokens=0, **params)
        (update,) = run_to_end(engine)["a"]
        assert (update.finish_reason, update.blames_request) == (reason, False)


def test_a_step_scores_no_more_than_there_is_memory_for() -> None:
    """A step may compute 64 million logits of prompt tokens, with a row for each scored token."""
    info = msgspec.structs.replace(fake_info(64, 4), vocab_size=1 << 24)
    runner = FakeRunner(4)
    engine = assemble(EngineConfig(model="fake", block_size=4), info, runner)
    add(engine, "scored", range(1, 11), max_tokens=1, prompt_logprobs=0)
    add(engine, "another", range(1, 11), max_tokens=1, prompt_logprobs=0)
    add(engine, "plain", range(1, 11), max_tokens=1)
    run_to_end(engine)
    chunks = [(request.request_id, len(request.token_ids)) for batch in runner.batches for request in batch.requests]
    assert [count for name, count in chunks if name == "scored"] == [4, 4, 2]
    assert [count for name, count in chunks if name == "another"] == [1, 2, 4, 3]
    assert [count for name, count in chunks if name == "plain"] == [10]


def test_the_floor_of_a_prompts_last_chunk_holds_its_scores() -> None:
    info, floors = fake_info(64, 4), []
    info = msgspec.structs.replace(info, size=msgspec.structs.replace(info.size, head_flops=1 << 20))
    for prompt_logprobs in (None, 0):
        engine = assemble(EngineConfig(model="fake", block_size=4), info, FakeRunner(4))
        add(engine, "a", range(1, 11), max_tokens=2, prompt_logprobs=prompt_logprobs)
        floors.append(engine.step().stats.floor_s)
    assert floors[1] - floors[0] == pytest.approx(9 * (1 << 20) / 1e15)  # see fake_info


def test_no_step_is_told_as_faster_than_the_machine() -> None:
    slow = msgspec.structs.replace(fake_info(64, 4), ceilings=Ceilings(read_bytes_per_s=1e-3, flops_per_s=1e-3))
    engine = assemble(EngineConfig(model="fake", block_size=4), slow, FakeRunner(4))
    add(engine, "a", max_tokens=3)
    while engine.has_work:
        stats = engine.step().stats
        assert stats.floor_s is not None and 0 < stats.floor_s <= stats.model_s
        assert stats.ceilings is not None and stats.ceilings.read_bytes_per_s > 1.0


def test_a_step_that_ran_nothing_is_not_traced(tmp_path: Path) -> None:
    engine = engine_with(FakeRunner(4), tracer=FileTracer(str(tmp_path / "trace")))
    add(engine, "a")
    engine.abort_requests(["a"])
    engine.step()
    assert (tmp_path / "trace").read_text() == ""
    engine.close()


def test_an_id_may_be_aborted_twice_at_once() -> None:
    engine = fake_engine()
    add(engine, "a")
    engine.abort_requests(["a", "a"])
    assert run_to_end(engine) == {} and engine._scheduler.stats.pool.held == 0


def test_an_abort_is_reported_in_the_next_stats() -> None:
    engine = fake_engine()
    add(engine, "a")
    engine.step()
    engine.abort_requests(["a"])
    assert engine.has_work
    stats = engine.step().stats
    assert (stats.phase, stats.num_running, stats.pool.held) == (None, 0, 0)
    assert not engine.has_work


def test_aborting_the_unknown_is_reported_and_makes_no_other_work() -> None:
    engine = fake_engine()
    engine.abort_requests(["nobody"])
    assert engine.step().stats.phase is None and not engine.has_work


def test_an_engine_that_rests_and_is_not_wanted_measures_the_machine_again_now_and_then() -> None:
    slow = msgspec.structs.replace(fake_info(64, 4), ceilings=Ceilings(read_bytes_per_s=1e-3, flops_per_s=1e15))
    num_measured = 0

    def measure(is_wanted: Callable[[], bool]) -> Ceilings | None:
        nonlocal num_measured
        if is_wanted():
            return None
        num_measured += 1
        return Ceilings(read_bytes_per_s=1e15, flops_per_s=1.0)

    engine = assemble(EngineConfig(model="fake", block_size=4), slow, FakeRunner(4), measure=measure)
    told = []
    for _ in range(2000):
        engine.rest(lambda: len(told) in (99, 100))
        told.append(num_measured)
    assert [told.index(num) + 1 for num in (1, 2, 3)] == [10, 102, 1000] and told[-1] == 3
    add(engine, "a")
    assert engine.step().stats.ceilings == Ceilings(1e15, 1e15)


def test_a_step_tells_what_it_computed_of_each_request() -> None:
    engine = engine_with(FakeRunner(4))
    add(engine, "a", max_tokens=2)
    add(engine, "b", max_tokens=1)
    steps = [engine.step() for _ in range(3)]
    told = [[(span.request_id, span.start, span.end) for span in each.computed] for each in steps]
    assert told == [[("a", 0, 3), ("b", 0, 3)], [("a", 3, 4)], []]


def test_a_trace_has_one_line_per_step(tmp_path: Path) -> None:
    path, started_s = tmp_path / "trace.jsonl", time.time()
    engine = engine_with(FakeRunner(4), tracer=FileTracer(str(path)))
    add(engine, "a", max_tokens=3)
    run_to_end(engine)
    engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["prefill", "decode", "decode"]
    assert lines[0]["requests"] == [["a", 0, 3, True]]
    assert started_s <= lines[0]["end_unix_s"] <= lines[2]["end_unix_s"] <= time.time()
    assert [line["predicted_s"] is None for line in lines] == [True, True, False]  # nothing is known of a first step
    assert [(line["floor_s"], line["bound"]) for line in lines] == [(1e-12, "memory")] * 3  # see fake_info


def test_a_trace_that_cannot_be_opened_is_a_setting_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace"):
        check_trace_file(str(tmp_path / "missing" / "trace.jsonl"))


def test_an_engine_that_starts_again_does_so_without_its_trace_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(open_tracer(str(tmp_path / "missing" / "trace.jsonl")), NullTracer)
    assert "no trace" in caplog.text


def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(FakeRunner(4), tracer=FileTracer("/dev/full"))
    for index in range(200):
        add(engine, str(index), max_tokens=2)
    assert len(run_to_end(engine)) == 200
    assert caplog.messages == ["the trace ends: /dev/full cannot be written: No space left on device"]
    engine.close()


def test_phases_add_up_to_the_whole() -> None:
    timings = RequestTimings(queue_s=0.1, prefill_s=0.2, inter_token_s=(0.01, 0.03, 0.02))
    assert timings.ttft_s == pytest.approx(0.3) and timings.decode_s == pytest.approx(0.06)
    assert timings.e2e_s == timings.ttft_s + timings.decode_s
    assert timings.tpot_s == pytest.approx(0.02)
    assert (timings.itl_percentile_s(50), timings.itl_percentile_s(99), timings.itl_percentile_s(0)) == (
        0.02,
        0.03,
        0.01,
    )


def test_one_token_has_no_gaps() -> None:
    timings = RequestTimings(queue_s=0.1, prefill_s=0.2)
    assert (timings.tpot_s, timings.itl_percentile_s(99), timings.decode_s) == (None, None, 0.0)
