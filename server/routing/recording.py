"""A record of what a routing policy was told and what it chose, one line of JSON each; and the same calls made again.

Whether a policy still decides as it did in service, and how another one would have decided, is then a matter of
reading a file.
"""

import contextlib
import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from server.routing.policies import new_policy
from server.routing.policy import RoutedPrompt, RoutingPolicy
from server.routing.replica_loads import ReplicaLoad

logger = logging.getLogger("twostep.routing")


class RecordingPolicy:
    """A routing policy that writes down every call before it returns, as long as the file takes it."""

    def __init__(self, name: str, file: TextIO, **settings: Any) -> None:
        """Makes the policy of this name, with the settings that `new_policy` knows."""
        self._policy = new_policy(name, **settings)
        self._file = file
        self._write("policy", name=name, settings=settings)

    def add(self, replica: str) -> None:
        self._write("add", replica=replica)
        self._policy.add(replica)

    def remove(self, replica: str) -> None:
        self._write("remove", replica=replica)
        self._policy.remove(replica)

    def report(self, replica: str, load: ReplicaLoad) -> None:
        self._write("report", replica=replica, load=[load.waiting_tokens, load.num_running])
        self._policy.report(replica, load)

    def choose(self, prompt: RoutedPrompt, excluded: Collection[str] = ()) -> str | None:
        chosen = self._policy.choose(prompt, excluded)
        self._write("choose", prompt=_written(prompt), excluded=list(excluded), chosen=chosen)
        return chosen

    def sent(self, prompt: RoutedPrompt, replica: str) -> None:
        self._write("sent", prompt=_written(prompt), replica=replica)
        self._policy.sent(prompt, replica)

    def _write(self, call: str, **fields: Any) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps({"call": call, **fields}) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk ends the record, and not the routing
            logger.warning("decisions of the router are recorded no further: %s", error)
            with contextlib.suppress(OSError):
                self._file.close()


@dataclass(frozen=True, slots=True)
class Replayed:
    """How many decisions a record has, and how many of them were others this time."""

    num_decisions: int
    num_different: int


def replay(lines: Iterable[str], name: str | None = None) -> Replayed:
    """Makes the calls of a record again, of the same policy or of that of another name. What was sent is sent again as
    it was, whatever is chosen now. Raises ValueError, KeyError or TypeError for what is no record."""
    calls = map(json.loads, lines)
    first: dict[str, Any] = next(calls, {})
    policy = new_policy(name or first["name"], **first["settings"])
    decisions = [_chooses_again(policy, each) for each in calls]
    made = [each for each in decisions if each is not None]
    return Replayed(len(made), made.count(False))


def _chooses_again(policy: RoutingPolicy, call: dict[str, Any]) -> bool | None:
    """Makes a call. Returns whether it chose as before; None if it chooses nothing."""
    match call["call"]:
        case "choose":
            return bool(policy.choose(_read(call["prompt"]), call["excluded"]) == call["chosen"])
        case "sent":
            policy.sent(_read(call["prompt"]), call["replica"])
        case "report":
            policy.report(call["replica"], ReplicaLoad(*call["load"]))
        case "add":
            policy.add(call["replica"])
        case "remove":
            policy.remove(call["replica"])
        case unknown:
            raise ValueError(f"a record has no call {unknown!r}")
    return None


def _written(prompt: RoutedPrompt) -> list[Any]:
    return [[digest.hex() for digest in prompt.digests], prompt.num_tokens, prompt.piece_tokens, prompt.key]


def _read(prompt: list[Any]) -> RoutedPrompt:
    digests, *rest = prompt
    return RoutedPrompt(tuple(map(bytes.fromhex, digests)), *rest)
