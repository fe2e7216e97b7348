import json
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from tests.loadtest.fake_server import FakeServer, running
from tests.loadtest.program import QUICK, Capture, Run


class Noted(list[dict[str, Any]]):
    """A list that tells of what is added."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, body: dict[str, Any]) -> None:
        super().append(body)
        self._tell()


def test_a_run_ends_with_one_document_that_counts_every_request_and_token(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK, "--warmup", "3")
    assert run.code == 0
    assert run.group["requests"]["total"] == run.group["requests"]["ok"] == 6
    assert run.group["tokens"] == {"prompt": 18, "output": 24, "cached_prompt": 0}
    assert (run.group["ttft_ms"]["count"], run.group["itl_ms"]["count"]) == (6, 18)
    assert len(fake.bodies) == 9
    assert {body["model"] for body in fake.bodies} == {"fake"}
    assert run.document["urls"][0]["client"]["cpu_s"] > 0
    assert run.document["warnings"] == []
    for title in ("TTFT", "ITL", "TPOT", "E2E", "p50", "p99", "throughput", "the server's own view"):
        assert title in run.out


def test_all_prompts_of_a_run_its_warm_up_and_all_rounds_are_distinct(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        Run(capsys, fake.url, fake.url, *QUICK, "--prompt-len", "20", "--rounds", "2", "--warmup", "2")
    assert len({json.dumps(body["prompt"]) for body in fake.bodies}) == len(fake.bodies) == 4 * 8


def test_tokens_are_those_of_usage_when_chunks_carry_several(capsys: Capture) -> None:
    with running(FakeServer(tokens_per_chunk=2)) as fake:
        run = Run(capsys, fake.url, *QUICK)
    assert run.group["tokens"]["output"] == 24
    assert run.group["itl_ms"]["count"] == 6


def test_throughput_is_tokens_of_usage_over_the_time_of_the_run(capsys: Capture) -> None:
    with running(FakeServer(gap_s=0.02)) as fake:
        run = Run(capsys, fake.url, *QUICK)
    rate, busy_s = run.group["throughput"]["output_tokens_per_s"], run.group["busy_s"]
    assert rate == pytest.approx(24 / busy_s)
    assert busy_s >= 3 * 0.06


def test_goodput_is_the_share_within_the_targets(capsys: Capture) -> None:
    with running(FakeServer(first_token_s=0.05)) as fake:
        missed = Run(capsys, fake.url, *QUICK, "--goodput", "ttft:40").group["goodput"]
        met = Run(capsys, fake.url, *QUICK, "--goodput", "ttft:60000", "itl:60000").group["goodput"]
    assert (missed["requests"], missed["fraction"]) == (0, 0.0)
    assert (met["requests"], met["fraction"], met["met"]) == (6, 1.0, {"ttft": 6, "itl": 6})


def test_each_limit_is_counted_alone(capsys: Capture) -> None:
    with running(FakeServer(first_token_s=0.05)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--goodput", "ttft:40", "e2e:60000", "--goodput", "tpot:60000")
    assert run.group["goodput"]["met"] == {"ttft": 0, "tpot": 6, "e2e": 6}
    assert run.group["goodput"]["requests"] == 0
    assert "TTFT <= 40 ms: 0, TPOT <= 60000 ms: 6, E2E <= 60000 ms: 6" in run.out


def test_an_open_loop_sends_whatever_the_server_does(capsys: Capture) -> None:
    with running(FakeServer(first_token_s=0.5)) as fake:
        run = Run(capsys, fake.url, *QUICK[:6], "--rate", "200", "--warmup", "0")
    assert run.group["send_lag_ms"]["count"] == 6
    assert fake.peak_in_flight > 1


def test_a_duration_ends_the_run(capsys: Capture) -> None:
    with running(FakeServer(gap_s=0.01)) as fake:
        run = Run(capsys, fake.url, "--max-tokens", "4", "--duration", "0.3", "--concurrency", "2", "--quiet")
    assert run.group["requests"]["ok"] >= 2
    assert run.document["config"]["schedule"]["num_requests"] is None


def test_rejections_are_counted_apart_and_are_no_warning(capsys: Capture) -> None:
    with running(FakeServer(num_rejections=2)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--warmup", "0", "--strict")
    assert run.code == 0
    assert (run.group["requests"]["rejected"], run.group["requests"]["ok"]) == (2, 4)
    assert run.group["http_statuses"] == {"429": 2}


def test_failed_warm_up_requests_are_warned_of(capsys: Capture) -> None:
    with running(FakeServer(num_rejections=2)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--warmup", "2")
    assert run.document["warnings"] == ["A: 2 warm-up requests failed; the first: rejected: slow down"]
    assert run.group["requests"]["ok"] == run.group["requests"]["total"] == 6


def test_a_rate_that_the_client_did_not_offer_is_warned_of(capsys: Capture) -> None:
    with running(FakeServer(first_token_s=0.1)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--rate", "1000")
    assert fake.peak_in_flight == 2
    assert run.group["send_lag_ms"]["max"] >= 100
    assert any("left late" in warning for warning in run.document["warnings"])


def test_retried_rejections_end_well(capsys: Capture) -> None:
    with running(FakeServer(num_rejections=2)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--warmup", "0", "--retry-429")
    assert run.group["requests"]["ok"] == 6
    assert run.group["num_retries"] == 2


def test_broken_streams_and_errors_are_counted_and_warned_of(capsys: Capture) -> None:
    for fake, outcome in (
        (FakeServer(breaks_after_chunks=2), "broken"),
        (FakeServer(error_after_chunks=2), "stream_error"),
    ):
        with running(fake):
            run = Run(capsys, fake.url, *QUICK, "--warmup", "0")
        assert run.group["requests"][outcome] == 6
        assert run.code == 1
        assert any(f"6 {outcome}" in warning for warning in run.document["warnings"])


def test_an_http_error_is_shown_with_the_servers_own_words(capsys: Capture) -> None:
    with running(FakeServer(failing_status=400)) as fake:
        run = Run(capsys, fake.url, *QUICK)
    assert run.group["http_statuses"] == {"400": 6}
    assert run.group["failures"] == {"no such thing": 6}
    assert "6 x no such thing" in run.out


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (FakeServer(counter_error=1), "generation tokens: the server's counter advanced by 30"),
        (FakeServer(claimed_ttft_ms=90_000), "the server's TTFT is longer"),
        (FakeServer(extra_completion_tokens=1), "not of the length asked for"),
        (FakeServer(extra_prompt_tokens=1), "another length than was sent"),
        (FakeServer(sends_usage=False), "came without usage"),
    ],
)
def test_what_does_not_fit_is_a_loud_warning_and_strict_makes_it_an_error(
    fake: FakeServer, words: str, capsys: Capture
) -> None:
    with running(fake):
        lenient, strict = Run(capsys, fake.url, *QUICK), Run(capsys, fake.url, *QUICK, "--strict")
    assert (lenient.code, strict.code) == (0, 1)
    assert any(words in warning for warning in lenient.document["warnings"])
    assert "WARNING" in lenient.out


def test_a_server_without_timings_and_metrics_is_measured_all_the_same(capsys: Capture) -> None:
    with running(FakeServer(sends_timings=False, sends_metrics=False)) as fake:
        run = Run(capsys, fake.url, *QUICK, "--strict")
    assert run.code == 0
    assert run.document["urls"][0]["server_view"] is None


def test_two_servers_are_measured_in_turns_and_compared(capsys: Capture) -> None:
    with running(FakeServer(first_token_s=0.005)) as fast, running(FakeServer(first_token_s=0.2)) as slow:
        run = Run(capsys, fast.url, slow.url, *QUICK, "--rounds", "2")
    ttft = run.document["comparison"]["B/A"]["all"]["TTFT p50 ms"]
    assert len(ttft["per_round"]) == 2
    assert min(ttft["per_round"]) <= ttft["median"] <= max(ttft["per_round"])
    assert ttft["median"] > 1
    assert [url["groups"]["all"]["requests"]["ok"] for url in run.document["urls"]] == [12, 12]
    assert [len(url["rounds"]) for url in run.document["urls"]] == [2, 2]
    assert "B/A" in run.out


@pytest.mark.slow
def test_a_comparison_alternates_and_has_confidence_intervals(capsys: Capture) -> None:
    order: list[str] = []
    fast, slow = FakeServer(), FakeServer(first_token_s=0.1)
    with running(fast), running(slow):
        for fake, name in ((fast, "A"), (slow, "B")):
            fake.bodies = Noted(lambda name=name: order.append(name))
        run = Run(capsys, fast.url, "--compare", slow.url, *QUICK, "--rounds", "3", "--warmup", "0")
    ratios = run.document["comparison"]["B/A"]["all"]
    ttft = ratios["TTFT p50 ms"]
    assert len(ttft["per_round"]) == 3 and ttft["ci95"][0] <= ttft["mean"] <= ttft["ci95"][1]
    known = [ratio["ci95"] for ratio in ratios.values() if ratio["ci95"] is not None]  # gaps may be 0 in a round
    assert run.out.count("]*") == sum(not low <= 1 <= high for low, high in known)
    assert "[95 % confidence interval]" in run.out
    assert [name for name, _ in groupby(order)] == ["A", "B"] * 3


def test_decoders_and_long_prompts_are_reported_apart(capsys: Capture) -> None:
    flags = ("--workload", "long-among-decoders", "--concurrency", "2", "--prompt-len", "4", "--max-tokens", "30")
    with running(FakeServer(gap_s=0.02)) as fake:
        run = Run(capsys, fake.url, *flags, "--long-prompt-len", "50", "--long-every", "0.1", "--quiet")
    groups = run.document["urls"][0]["groups"]
    assert groups["decoders"]["tokens"] == {"prompt": 8, "output": 60, "cached_prompt": 0}
    assert groups["long"]["requests"]["ok"] >= 1
    assert groups["long"]["tokens"]["prompt"] == 50 * groups["long"]["requests"]["ok"]
    assert {len(body["prompt"]) for body in fake.bodies} == {4, 50}


def test_warm_up_requests_are_short_and_one_of_them_is_as_long_as_the_long_ones(capsys: Capture) -> None:
    flags = ("--scenario", "S5", "--max-tokens", "20", "--long-prompt-len", "50", "--warmup", "3", "--quiet")
    with running(FakeServer()) as fake:
        Run(capsys, fake.url, *flags)
    assert sorted(len(body["prompt"]) for body in fake.bodies[:3]) == [32, 32, 50]
    assert {body["max_tokens"] for body in fake.bodies[:3]} == {16}
    assert {body["max_tokens"] for body in fake.bodies[3:]} == {20}


def test_streams_without_a_request_are_no_load_and_warned_of(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        few = Run(capsys, fake.url, *QUICK, "--concurrency", "8")
        enough = Run(capsys, fake.url, *QUICK, "--concurrency", "6")
        arrivals = Run(capsys, fake.url, *QUICK, "--concurrency", "8", "--rate", "1000")
    assert few.document["warnings"] == ["A: only 6 of the 8 streams had a request (--requests)"]
    assert enough.document["warnings"] == arrivals.document["warnings"] == []


def test_decoders_that_no_long_prompt_disturbed_are_warned_of(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, "--scenario", "S5", "--max-tokens", "2", "--quiet")
    assert any("before a long prompt arrived" in warning for warning in run.document["warnings"])


def test_secrets_are_not_in_the_report(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK, "--api-key", "s3cret", "--header", "x-token: s3cret")
    assert fake.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in run.out + run.err


def test_a_server_that_is_still_starting_is_waited_for(capsys: Capture) -> None:
    with running(FakeServer(num_not_ready=2)) as fake:
        assert Run(capsys, fake.url, *QUICK, "--wait", "20").code == 0


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_chats_and_responses_are_measured_with_text_prompts(endpoint: str, capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK, "--endpoint", endpoint, "--strict")
    assert run.code == 0
    assert run.group["tokens"] == {"prompt": 18, "output": 24, "cached_prompt": 0}
    assert run.document["config"]["wire"]["endpoint"] == endpoint


def test_text_prompts_are_sent_as_text(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, *QUICK, "--text")
    assert all(len(body["prompt"].split()) == 3 for body in fake.bodies)
    assert run.group["tokens"]["prompt"] == 18
