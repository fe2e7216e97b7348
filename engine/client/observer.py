"""Who is told of numbers as they arise: metrics, tests. No observer can cost a token: see `GuardedObserver`."""

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol

from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from engine.core.stats import RequestTimings, StepShare, StepStats

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class EngineObserver(Protocol):
    """Receives numbers as they arise, on the event loop. Must not block. What it raises costs a line of the log."""

    def on_step(self, stats: StepStats, shares: Sequence[StepShare] = ()) -> None:
        """Called after each step, with what it computed of each live request."""

    def on_restart(self) -> None:
        """The engine process died, and a new one is started. Its steps count from 0 again."""

    def on_prompt(self, timings: RequestTimings, num_tokens: int) -> None:
        """Called once per request whose prompt was computed: with its first token, or without one with its end. The
        tokens are 0 where they were counted for another answer to the same prompt."""

    def on_remote_prefill(self, seconds: float, num_tokens: int | None) -> None:
        """Called once per prompt that another server was asked for, with the tokens whose blocks it stored; None if it
        failed."""

    def on_lost_tokens(self, num_tokens: int) -> None:
        """Called once per request that did not find so many of the tokens whose blocks another server stored."""

    def on_first_token(self, ttft_s: float) -> None:
        """Called once per request that got a token."""

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Called with each output of `generate` that has tokens. `gap_s` is the time since the previous token, None for
        the first."""

    def on_finish(self, reason: FinishReason, timings: RequestTimings | None) -> None:
        """Called exactly once per admitted request; timings is None if it never got a token."""


def observe_output(
    observer: EngineObserver, request: GenerationRequest, output: RequestOutput, gap_s: float | None
) -> None:
    """Report an output of `generate` to the observer. `gap_s` is the time since the request's previous token."""
    is_first = len(output.token_ids) == output.num_output_tokens
    if is_first and output.timings is not None:
        observer.on_prompt(output.timings, 0 if request.repeats_prompt else output.num_prompt_tokens)
        if output.token_ids:
            observer.on_first_token(output.timings.ttft_s)
    if output.token_ids:
        observer.on_tokens(len(output.token_ids), gap_s)


class NullObserver:
    """Observes nothing."""

    def on_step(self, stats: StepStats, shares: Sequence[StepShare] = ()) -> None:
        pass

    def on_restart(self) -> None:
        pass

    def on_prompt(self, timings: RequestTimings, num_tokens: int) -> None:
        pass

    def on_remote_prefill(self, seconds: float, num_tokens: int | None) -> None:
        pass

    def on_lost_tokens(self, num_tokens: int) -> None:
        pass

    def on_first_token(self, ttft_s: float) -> None:
        pass

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        pass

    def on_finish(self, reason: FinishReason, timings: RequestTimings | None) -> None:
        pass


class GuardedObserver:
    """Passes everything on to another observer, and logs what that raises instead of raising it: streams go on."""

    def __init__(self, observer: EngineObserver) -> None:
        self._observer = observer

    def on_step(self, stats: StepStats, shares: Sequence[StepShare] = ()) -> None:
        self._call(self._observer.on_step, stats, shares)

    def on_restart(self) -> None:
        self._call(self._observer.on_restart)

    def on_prompt(self, timings: RequestTimings, num_tokens: int) -> None:
        self._call(self._observer.on_prompt, timings, num_tokens)

    def on_remote_prefill(self, seconds: float, num_tokens: int | None) -> None:
        self._call(self._observer.on_remote_prefill, seconds, num_tokens)

    def on_lost_tokens(self, num_tokens: int) -> None:
        self._call(self._observer.on_lost_tokens, num_tokens)

    def on_first_token(self, ttft_s: float) -> None:
        self._call(self._observer.on_first_token, ttft_s)

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self._call(self._observer.on_tokens, num_tokens, gap_s)

    def on_finish(self, reason: FinishReason, timings: RequestTimings | None) -> None:
        self._call(self._observer.on_finish, reason, timings)

    def _call(self, method: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("observing a number failed; the request it belongs to goes on")
