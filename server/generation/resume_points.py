"""Between the events of a stream: how it goes on on another server, should this one die.

A point follows the events of each output, so that whoever has the point has all of these events, and none of the next.
There is none behind the last output: what follows it ends the stream.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.core.outputs import RequestOutput
from server.core.errors import ErrorKind
from server.generation.plan import GenerationPlan
from server.generation.sse import comment
from server.generation.usage import UsageCounter
from server.protocol.generation import GenerationParams


class ResumePoints(Protocol):
    def behind(self, output: RequestOutput) -> bytes:
        """Returns what follows the events of an output."""

    def before_failure(self, kind: ErrorKind) -> bytes:
        """Returns what precedes the events of a failure."""


class NoResumePoints:
    def behind(self, output: RequestOutput) -> bytes:
        return b""

    def before_failure(self, kind: ErrorKind) -> bytes:
        return b""


Encode = Callable[[Mapping[str, Any]], bytes]


class WrittenResumePoints:
    """Tells the tokens of each output, what the server that is to go on must have in common with this one, and what
    was cached here, which counts for the whole stream."""

    def __init__(self, plan: GenerationPlan[GenerationParams], counter: UsageCounter, encode: Encode) -> None:
        self._encode = encode
        self._head: Mapping[str, Any] = {name: plan.head[name] for name in ("system_fingerprint", "seed")}
        self._counter = counter

    def behind(self, output: RequestOutput) -> bytes:
        if output.is_finished:
            return b""
        return self._encode({**self._head, "token_ids": output.token_ids, "cached": self._counter.prompt_details()})

    def before_failure(self, kind: ErrorKind) -> bytes:
        return self._encode({"error": kind.code})


NO_RESUME_POINTS = NoResumePoints()


def resume_points(
    plan: GenerationPlan[GenerationParams], counter: UsageCounter, are_asked_for: bool, encode: Encode = comment
) -> ResumePoints:
    return WrittenResumePoints(plan, counter, encode) if are_asked_for else NO_RESUME_POINTS
