"""Bursts of requests: simulated by the engine's scheduler, and measured by the load test."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from engine.core.config import EngineConfig
from engine.core.step_seconds import StepSeconds
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.live_server import FakeBackend, live_server
from twostep.commands import measured_burst
from twostep.commands.burst import Burst, BurstTimes, ServingSeconds, simulated
from twostep.commands.endpoint import Endpoint, EndpointError
from twostep.commands.measured_burst import send, serving_seconds

STEPS = StepSeconds(prefill=((100, 0.1), (2000, 2.0)), decode=((1, 0.01), (32, 0.041)))
CONFIG = EngineConfig(model="", target_itl_ms=250.0)


NOTHING = ServingSeconds()


def times_of(burst: Burst, serving: ServingSeconds = NOTHING) -> BurstTimes:
    return simulated(burst, STEPS, serving, CONFIG)


def test_one_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    found = times_of(Burst(1, 100, 5))
    assert found == pytest.approx(BurstTimes(0.1, 0.01, 5 / 0.14))


def test_prompts_of_requests_that_arrive_together_share_a_step() -> None:
    found = times_of(Burst(8, 100, 5))
    assert found.last_ttft_s == pytest.approx(0.8) and found.itl_s == pytest.approx(0.017)


def test_prompts_that_come_while_another_streams_keep_its_gaps() -> None:
    serving = ServingSeconds(request_s=1e-3)  # the first runs alone
    found = times_of(Burst(8, 1000, 200), serving)
    assert 8.0 < found.last_ttft_s < 11.0, "and decode steps between their parts"
    assert 0.017 < found.itl_s < 0.25
    assert times_of(Burst(8, 1000, 200)).last_ttft_s < 9.0


def test_what_serving_adds_is_in_every_time() -> None:
    found = times_of(Burst(1, 100, 5), ServingSeconds(step_s=0.001, token_s=0.002, request_s=0.05))
    assert found == pytest.approx(BurstTimes(0.153, 0.013, 5 / 0.205))
    many = times_of(Burst(32, 100, 5), ServingSeconds(token_s=0.002))
    assert many.itl_s > 0.041 + 32 * 0.002


def test_requests_may_end_before_the_next_is_accepted() -> None:
    found = times_of(Burst(3, 100, 2), ServingSeconds(request_s=1.0))
    assert found == pytest.approx(BurstTimes(3.1, 0.01, 6 / 3.11))


def test_more_requests_than_run_at_once_wait() -> None:
    few = EngineConfig(model="", max_num_seqs=2)
    assert simulated(Burst(4, 100, 5), STEPS, NOTHING, few).last_ttft_s == pytest.approx(0.2 + 4 * 0.011 + 0.2)


def test_what_serving_adds_is_told_from_steps_of_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(model: str, flags: Sequence[str]) -> Iterator[Endpoint]:
        assert (model, *flags) == ("embedded", "--num-speculative-tokens", "0")
        yield Endpoint("", None, is_local=True)

    def sent(burst: Burst, _: Endpoint) -> dict[str, Any]:
        gap_s = (0.01 if burst.clients == 1 else 0.041) + 0.001 + 0.0002 * burst.clients
        return {"itl_ms": {"p50": 1e3 * gap_s}, "ttft_ms": {"p50": 1e3 * (0.1 + 0.0012 + 0.03)}}

    monkeypatch.setattr(measured_burst, "open_endpoint", opened)
    monkeypatch.setattr(measured_burst, "send", sent)
    assert serving_seconds(STEPS) == pytest.approx(ServingSeconds(0.001, 0.0002, 0.03))
    slow = StepSeconds(((1, 9.0),), ((1, 9.0),))
    assert serving_seconds(slow) == ServingSeconds(0.0, 0.0, 0.0), "where the server was faster by chance"


def test_a_burst_is_sent_after_a_few_that_warm_up() -> None:
    engine = FakeEngine(info=msgspec.structs.replace(INFO, vocab_size=1000))
    with live_server(FakeBackend(engine), api_key=("secret",)) as server:
        seen = send(Burst(6, 5, 3), Endpoint(server.url, "secret", is_local=False))
        assert seen["requests"]["ok"] == 6 and seen["tokens"] == {"prompt": 30, "output": 18, "cached_prompt": 0}
        assert len(server.engine.requests) == 6 + 4
        with pytest.raises(EndpointError, match=r"failed: .*key"):
            send(Burst(1, 5, 3), Endpoint(server.url, "wrong", is_local=False))
    with pytest.raises(EndpointError, match="The load test failed: "):
        send(Burst(1, 5, 3), Endpoint(server.url, "secret", is_local=False))  # it has ended
