"""Warnings about a measurement, as sentences: reasons not to trust its numbers."""

from loadtest.benchmark import Benchmark
from loadtest.config import Schedule
from loadtest.record import Outcome
from loadtest.results import TargetResult
from loadtest.stats import Summary
from loadtest.workload import WorkloadKind

_MAX_SEND_LAG_MS = 50.0
_FAILURES = tuple(outcome for outcome in Outcome if outcome not in (Outcome.OK, Outcome.REJECTED))


def warnings_of(benchmark: Benchmark) -> list[str]:
    """Returns the warnings, each one sentence that names its target. Rejections (429) are none: load shedding is
    allowed."""
    return [
        f"{result.target.label}: {sentence}"
        for result in benchmark.results
        for sentence in (*_of_target(benchmark, result), *result.server_view.problems)
    ]


def _of_target(benchmark: Benchmark, result: TargetResult) -> list[str]:
    config = benchmark.config
    found = [
        sentence
        for name, summary in result.groups.items()
        for sentence in _of_group(summary, config.wire.ignore_eos, f" of {name}" if len(result.groups) > 1 else "")
    ]
    if result.warmup_failures:
        found.insert(
            0, f"{len(result.warmup_failures)} warm-up requests failed; the first: {result.warmup_failures[0]}"
        )
    schedule = config.schedule
    found += _of_streams(schedule)
    if config.shape.kind is WorkloadKind.LONG_AMONG_DECODERS and result.rounds and "long" not in result.groups:
        found.append("the decoding streams ended before a long prompt arrived (--requests, --long-every)")
    return found


def _of_streams(schedule: Schedule) -> list[str]:
    """Returns whether some streams of a closed loop had nothing to do."""
    num, flag = schedule.num_sessions or schedule.num_requests, "sessions" if schedule.num_sessions else "requests"
    if schedule.is_open or not num or num >= (schedule.concurrency or 1):
        return []
    return [f"only {num} of the {schedule.concurrency} streams had a request (--{flag})"]


def _of_group(summary: Summary, is_length_fixed: bool, of_group: str) -> list[str]:
    found = []
    if failures := ", ".join(f"{summary.outcomes[end]} {end}" for end in _FAILURES if summary.outcomes[end]):
        found.append(f"of {summary.num_requests} requests{of_group} failed: {failures}")
    if summary.num_without_usage:
        found.append(f"{summary.num_without_usage} answers{of_group} came without usage: token counts are unknown")
    if is_length_fixed and summary.num_other_length:
        found.append(f"{summary.num_other_length} answers{of_group} are not of the length asked for")
    if summary.num_other_prompt:
        found.append(f"the prompts of {summary.num_other_prompt} requests{of_group} had another length than was sent")
    lag = summary.send_lag_ms.distribution()
    if lag is not None and lag.p99 > _MAX_SEND_LAG_MS:
        found.append(f"requests{of_group} left late: send lag p50 {lag.p50:.0f} ms, p99 {lag.p99:.0f} ms")
    return found
