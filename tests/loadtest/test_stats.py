import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import Outcome, Record, Reply, Usage
from loadtest.stats import Sample, Summary, Targets, percentile

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60)


def record(
    *arrivals_s: float, outcome: Outcome = Outcome.OK, tokens: int | None = None, status: int = 200, sent_s: float = 0.0
) -> Record:
    count = len(arrivals_s) if tokens is None else tokens
    reply = Reply(
        outcome,
        sent_s,
        ended_s=arrivals_s[-1] if arrivals_s else sent_s,
        status=status,
        message="" if outcome is Outcome.OK else f"{outcome}!",
        arrivals_s=arrivals_s,
        usage=Usage(10, count) if tokens != -1 else None,
    )
    return Record("all", count, sent_s, reply)


def summary(*records: Record, targets: Targets | None = None) -> Summary:
    result = Summary(targets or Targets())
    for each in records:
        result.add(each)
    result.end_run()
    return result


@given(values)
def test_percentiles_interpolate_between_the_closest_ranks(sample: list[float]) -> None:
    ordered = sorted(sample)
    expected = statistics.quantiles(ordered, n=100, method="inclusive")
    assert [percentile(ordered, percent) for percent in range(1, 100)] == pytest.approx(expected, abs=1e-6)


@given(values)
def test_a_distribution_describes_the_values(sample: list[float]) -> None:
    gathered = Sample()
    for value in sample:
        gathered.add(value)
    distribution = gathered.distribution()
    assert distribution is not None
    assert (distribution.count, distribution.min, distribution.max) == (len(sample), min(sample), max(sample))
    assert distribution.mean == pytest.approx(statistics.fmean(sample), abs=1e-6)
    assert (
        distribution.min
        <= distribution.p50
        <= distribution.p90
        <= distribution.p95
        <= distribution.p99
        <= distribution.max
    )


def test_an_empty_sample_has_no_distribution() -> None:
    sample = Sample()
    sample.add(None)
    assert sample.distribution() is None


def test_beyond_its_capacity_a_sample_stays_small_and_fair() -> None:
    sample = Sample(capacity=500)
    shuffled = random.Random(1).sample(range(20_000), 20_000)
    for value in sorted(shuffled):
        sample.add(float(value))
    distribution = sample.distribution()
    assert len(sample.values) == 500
    assert distribution is not None
    assert (distribution.count, distribution.mean, distribution.min, distribution.max) == (20_000, 9999.5, 0, 19_999)
    assert 8_000 < distribution.p50 < 12_000


def test_latencies_are_of_ok_requests_only() -> None:
    seen = summary(record(0.5, 1.0), record(0.1, outcome=Outcome.BROKEN))
    distribution = seen.ttft_ms.distribution()
    assert distribution is not None
    assert (distribution.count, distribution.mean) == (1, 500)


def test_every_request_is_counted_under_one_outcome() -> None:
    seen = summary(record(1.0), record(outcome=Outcome.REJECTED, status=429), record(outcome=Outcome.TIMEOUT))
    assert seen.num_requests == 3
    assert (seen.num_ok, seen.outcomes[Outcome.REJECTED], seen.outcomes[Outcome.TIMEOUT]) == (1, 1, 1)
    assert seen.statuses == {429: 1}


def test_examples_of_failures_are_bounded_but_counted() -> None:
    replies = [Reply(Outcome.BROKEN, 0, 0, message=f"m{number % 7}") for number in range(70)]
    seen = summary(*(Record("all", 1, 0.0, reply) for reply in replies))
    assert dict(seen.examples) == {f"m{number}": 10 for number in range(5)}


def test_rates_are_over_the_span_of_the_requests() -> None:
    seen = summary(record(1.0, 2.0, sent_s=0.0), record(3.0, 4.0, sent_s=2.0))
    assert seen.busy_s == 4.0
    assert seen.per_second(seen.num_ok) == 0.5
    assert seen.token_rate(seen.completion_tokens) == 1.0
    assert seen.token_rate(seen.prompt_tokens) == 5.0
    assert summary(record(4.0, sent_s=1.0), record(2.0, sent_s=0.0)).busy_s == 4.0


def test_spans_of_several_runs_add_up_without_the_time_between() -> None:
    seen = summary(record(1.0, sent_s=0.0))
    seen.add(record(103.0, sent_s=100.0))
    seen.end_run()
    assert seen.busy_s == 4.0


def test_tokens_are_those_of_usage() -> None:
    seen = summary(record(1.0, 2.0, tokens=9))
    assert (seen.completion_tokens, seen.prompt_tokens) == (9, 10)
    assert seen.num_other_length == 0


def test_token_rates_are_unknown_when_one_answer_lacks_usage() -> None:
    seen = summary(record(1.0), record(1.0, tokens=-1))
    assert seen.num_without_usage == 1
    assert seen.token_rate(seen.completion_tokens) is None
    assert seen.per_second(seen.num_ok) == 2.0


def test_an_answer_of_another_length_is_noticed() -> None:
    reply = Reply(Outcome.OK, 0, 1, arrivals_s=[1.0], usage=Usage(1, 1))
    assert summary(Record("all", 2, 0.0, reply)).num_other_length == 1


def test_chunks_of_one_read_are_counted_as_coalesced() -> None:
    assert summary(record(1.0, 1.0, 2.0)).num_coalesced == 1


@pytest.mark.parametrize(
    ("targets", "num_good"),
    [
        (Targets(ttft_ms=1000), 2),
        (Targets(ttft_ms=999), 1),
        (Targets(itl_ms=500), 1),
        (Targets(itl_ms=2000), 2),
        (Targets(ttft_ms=999, itl_ms=600), 0),
        (Targets(tpot_ms=500), 1),
        (Targets(e2e_ms=1500), 1),
        (Targets(e2e_ms=2100, tpot_ms=2000), 2),
    ],
)
def test_goodput_counts_ok_requests_within_every_target(targets: Targets, num_good: int) -> None:
    slow_start, slow_stream = record(1.0, 1.5), record(0.1, 2.1)
    failed = record(0.1, 0.2, outcome=Outcome.BROKEN)
    seen = summary(slow_start, slow_stream, failed, targets=targets)
    assert seen.num_good == num_good
    assert seen.good_fraction == num_good / 3


def test_without_targets_nothing_is_counted_as_good() -> None:
    assert (summary(record(1.0)).num_good, Targets().is_set) == (0, False)


def test_a_latency_that_a_request_does_not_have_is_within_every_limit() -> None:
    assert Targets(itl_ms=1, tpot_ms=1).are_met_by(record(1.0))
    assert not Targets(itl_ms=1, tpot_ms=1).are_met_by(record(1.0, outcome=Outcome.BROKEN))


def test_the_itl_target_is_for_the_99th_percentile_of_a_requests_own_gaps() -> None:
    steady = [number * 0.01 for number in range(1, 400)]
    assert Targets(itl_ms=11).are_met_by(record(*steady, steady[-1] + 1.0))
    assert not Targets(itl_ms=11).are_met_by(record(*steady, *(steady[-1] + number for number in range(1, 9))))
