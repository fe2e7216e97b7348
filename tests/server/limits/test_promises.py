"""Promises (SLOs) that requests ask for: refused where they cannot be kept, counted where they were or were not."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.datastructures import Headers

from engine.core.errors import OverloadedError, RequestTimeoutError
from engine.core.stats import RequestTimings
from engine.scheduling.cost.roofline import Roofline
from server.core.errors import BadRequestError
from server.core.promises import Promises
from server.core.timings import PhaseReport, TokenCounts
from server.generation.promises import promises_of
from tests.server.events import error_of
from tests.server.fake_engine import INFO
from tests.server.live_server import LiveServer, live_server
from tests.server.metrics.published_metrics import advance

TTFT, ITL = "x-slo-ttft-ms", "x-slo-itl-ms"
FLOOR_MS = Roofline(INFO.size, INFO.ceilings).floor_of_first_token().seconds * 1e3


def counted(server: LiveServer, act: Callable[[], Any]) -> dict[tuple[str, str], float]:
    """Returns how often each promise ended in each way meanwhile."""
    advanced = advance(server, act)
    found = {}
    for slo in ("ttft", "itl"):
        for outcome in ("kept", "missed", "refused"):
            try:
                found[slo, outcome] = advanced("twostep_slo_requests_total", slo=slo, outcome=outcome)
            except KeyError:  # never yet
                continue
    return {key: value for key, value in found.items() if value}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ttft_ms", "itl_ms", "outcomes"),
    [
        ("3", "0.5", {("ttft", "kept"): 1, ("itl", "kept"): 1}),  # as the fake engine's times are
        ("2.9", "0.5", {("ttft", "missed"): 1, ("itl", "kept"): 1}),
        ("1e3", "0.49", {("ttft", "kept"): 1, ("itl", "missed"): 1}),
        ("2.9", None, {("ttft", "missed"): 1}),
        (None, "0.6", {("itl", "kept"): 1}),
        (None, None, {}),
    ],
)
def test_what_was_kept_and_missed_is_counted(
    server: LiveServer, stream: bool, ttft_ms: str | None, itl_ms: str | None, outcomes: dict[tuple[str, str], int]
) -> None:
    headers = {name: value for name, value in ((TTFT, ttft_ms), (ITL, itl_ms)) if value is not None}
    assert counted(server, lambda: server.complete("Hi", headers, max_tokens=4, stream=stream)) == outcomes


def test_every_endpoint_that_generates_asks_alike(server: LiveServer) -> None:
    for ask in (server.complete, server.chat, server.respond, server.message, server.ollama):
        assert counted(server, lambda ask=ask: ask("Hi", {TTFT: "50"})) == {("ttft", "kept"): 1}  # type: ignore[misc]
        assert server.engine.requests[-1].ttft_limit_s == 0.05


def test_what_the_machine_takes_at_least_refuses_nothing_while_it_is_in_doubt() -> None:
    headers = Headers({ITL: "1e-9"})
    with pytest.raises(BadRequestError, match="cannot be met"):
        promises_of(headers, INFO, tokens_per_step=1)
    doubtful = msgspec.structs.replace(INFO.ceilings, is_in_doubt=True)
    info = msgspec.structs.replace(INFO, ceilings=doubtful)
    assert promises_of(headers, info, tokens_per_step=1).itl_s == pytest.approx(1e-12)


def test_a_gap_needs_two_tokens(server: LiveServer) -> None:
    assert counted(server, lambda: server.complete("Hi", {ITL: "0.1"}, max_tokens=1)) == {}


def test_what_is_refused_for_its_wait_is_counted_as_that(server: LiveServer) -> None:
    server.engine.refusal = OverloadedError("It would wait.", retry_after_s=3.2)

    def ask() -> None:
        refused = server.complete("Hi", {TTFT: "50", ITL: "9"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "4")

    assert counted(server, ask) == {("ttft", "refused"): 1, ("itl", "refused"): 1}


def test_what_ends_without_a_token_after_that_time_was_missed(server: LiveServer) -> None:
    server.engine.refusal = RequestTimeoutError("Late.", is_own_limit=False)
    assert counted(server, lambda: server.complete("Hi", {TTFT: str(FLOOR_MS * 1.01), ITL: "9"})) == {
        ("ttft", "missed"): 1
    }
    assert counted(server, lambda: server.complete("Hi", {TTFT: "1e6"})) == {}


def test_a_mistake_is_no_promise(server: LiveServer) -> None:
    assert counted(server, lambda: server.complete("Hi", {TTFT: "1e6"}, temperature=9)) == {}


@pytest.mark.parametrize("name", [TTFT, ITL])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "", "nan", "inf", "1,5"])
def test_what_is_no_time_is_refused(server: LiveServer, name: str, value: str) -> None:
    error = error_of(server.complete("Hi", {name: value}))
    assert error["param"] == name and "must be a number" in error["message"]


def test_what_this_machine_never_does_is_refused() -> None:
    with live_server(num_speculative_tokens=0) as server:
        for name in (TTFT, ITL):
            error = error_of(server.complete("Hi", {name: str(FLOOR_MS * 0.9)}))
            assert error["param"] == name and "cannot be met" in error["message"]
            assert server.complete("Hi", {name: str(FLOOR_MS * 1.1)}, max_tokens=1).status_code == 200
    with live_server(num_speculative_tokens=9) as server:  # then a step may yield ten tokens
        assert server.complete("Hi", {ITL: str(FLOOR_MS * 0.11)}, max_tokens=1).status_code == 200
        assert server.complete("Hi", {ITL: str(FLOOR_MS * 0.09)}).status_code == 400
        assert server.complete("Hi", {TTFT: str(FLOOR_MS * 0.9)}).status_code == 400


def test_a_time_is_kept_to_the_end_of_its_last_moment() -> None:
    timings = RequestTimings(
        queue_s=0.25, prefill_s=0.25, inter_token_s=(0.125, 0.375), prefill_chunks=1, preemptions=0
    )
    report = PhaseReport.of([timings], TokenCounts(1, 0, 3))
    assert dict(Promises(0.5, 0.25).outcomes(report)) == {"ttft": "kept", "itl": "kept"}
    assert dict(Promises(0.49, 0.24).outcomes(report)) == {"ttft": "missed", "itl": "missed"}
