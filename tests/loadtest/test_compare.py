import pytest

from loadtest.compare import METRICS, Ratio, ratio
from loadtest.record import Outcome, Record, Reply, Usage
from loadtest.results import RunResult, TargetResult
from loadtest.stats import Summary, Targets
from loadtest.target import parse_target


def measured(*ttfts_s: float | None) -> list[RunResult]:
    """Returns one round per TTFT; None stands for a round in which no request succeeded."""
    result = TargetResult(parse_target("A", "http://a"), "m")
    for ttft_s in ttfts_s:
        summary = Summary(Targets())
        if ttft_s is not None:
            arrivals_s = [ttft_s, ttft_s + 1]
            reply = Reply(Outcome.OK, 0.0, ttft_s + 1, arrivals_s=arrivals_s, usage=Usage(1, 2))
            summary.add(Record("all", 2, 0.0, reply))
        result.end_run(RunResult({"all": summary}, 0.1, 1.0, 0), None, None)
    return result.rounds


def test_a_ratio_is_the_other_over_the_base_round_by_round() -> None:
    found = ratio(METRICS["TTFT p50 ms"], "all", measured(1.0, 2.0, 2.0), measured(3.0, 1.0, 2.0))
    assert found is not None
    assert found.per_round == pytest.approx((3.0, 0.5, 1.0))
    assert found.median == pytest.approx(1.0)


def test_a_round_without_both_values_has_no_ratio() -> None:
    found = ratio(METRICS["TTFT p50 ms"], "all", measured(1.0, None, 2.0), measured(3.0, 1.0))
    assert found is not None
    assert found.per_round == pytest.approx((3.0,))
    assert ratio(METRICS["TTFT p50 ms"], "all", measured(None), measured(3.0)) is None
    assert ratio(METRICS["TTFT p50 ms"], "long", measured(1.0), measured(3.0)) is None


def test_the_mean_of_twice_and_half_as_much_is_no_difference() -> None:
    found = Ratio((2.0, 0.5, 1.0))
    assert found.mean == pytest.approx(1.0)
    assert found.interval is not None
    assert found.interval[0] * found.interval[1] == pytest.approx(1.0)
    assert not found.is_different


def test_a_difference_is_one_that_the_rounds_agree_upon() -> None:
    assert Ratio((1.2, 1.21, 1.19)).is_different
    assert Ratio((0.8, 0.81, 0.79)).is_different
    assert not Ratio((1.2, 1.6, 0.9)).is_different
    assert not Ratio((1.2, 1.2)).is_different


def test_there_is_no_interval_of_few_rounds_or_of_a_ratio_of_zero() -> None:
    assert Ratio((1.0, 2.0)).interval is None
    assert (Ratio((1.0, 0.0, 2.0)).interval, Ratio((1.0, 0.0, 2.0)).mean) == (None, 0.0)


def test_a_server_of_twice_the_speed_has_twice_the_throughput() -> None:
    found = ratio(METRICS["output tok/s"], "all", measured(3.0), measured(1.0))
    assert found is not None
    assert found.median == pytest.approx(2.0)
