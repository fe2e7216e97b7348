"""Comments in streams of typed events: how the stream goes on on another server, should this one die.

A point follows the events of each output, so that whoever has the point has all of these events, and none of the next.
There is none behind the last output: what follows it ends the stream.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from engine.core.outputs import RequestOutput
from server.core.errors import ErrorKind
from server.generation.plan import GenerationPlan
from server.generation.sse import comment
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


class CommentedResumePoints:
    """Tells the tokens of each output, and what the server that is to go on must have in common with this one."""

    def __init__(self, plan: GenerationPlan[GenerationParams]) -> None:
        self._head: Mapping[str, Any] = {name: plan.head[name] for name in ("system_fingerprint", "seed")}

    def behind(self, output: RequestOutput) -> bytes:
        return b"" if output.is_finished else comment({**self._head, "token_ids": output.token_ids})

    def before_failure(self, kind: ErrorKind) -> bytes:
        return comment({"error": kind.code})


NO_RESUME_POINTS = NoResumePoints()


def resume_points(plan: GenerationPlan[GenerationParams], are_asked_for: bool) -> ResumePoints:
    return CommentedResumePoints(plan) if are_asked_for else NO_RESUME_POINTS
