"""Finds poison requests: which requests may have killed the engine, and which one did; torch-free."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Evidence of one death, and how much makes a request guilty: two crashes, or three kills during trials.
_CRASH, _KILL_ON_TRIAL, _GUILTY = 3, 2, 6


@dataclass(frozen=True, slots=True)
class Death:
    """What is known of how an engine process ended."""

    computed: Sequence[str] = ()
    """Ids of the requests in the step that the process was running."""
    may_be_from_outside: bool = False
    """Whether a signal that anyone may send killed the process: a person, or the kernel when memory runs out."""


class PoisonRequests:
    """The rule by which a request is found guilty, and an innocent one never is:

    - A death is held against the requests that the engine was computing when it died and that had not got two tokens
      from that engine process yet. (Two, because a request that goes on gets its first from prefill: only the second
      shows that decode survives it, too.) A request that got two is innocent of this death.
    - Requests that it is held against are suspects. The next engine process computes them before all others and one at
      a time:
      the next begins when the one before got two tokens, and is cleared by that, or ended.
    - A request is guilty when the engine crashed twice while it computed nothing else, with no two tokens in between.
      Of deaths that may have come from outside only those during a trial count, and it takes three.

    So a request that crashes the engine runs alone after one death or two, and is refused two deaths later. One that
    merely ran when something else ended the engine passes its trial. So does a victim of kills from outside: three of
    them in a row would have to hit it within its first two tokens after a restart.
    """

    def __init__(self) -> None:
        self._evidence: dict[str, int] = {}  # against each suspect, in the order of their trials

    def __len__(self) -> int:
        return len(self._evidence)

    @property
    def on_trial(self) -> str | None:
        """The suspect that must run alone now: no other request may start. None when all may."""
        return next(iter(self._evidence), None)

    def clear(self, request_id: str) -> None:
        """Clear a suspect, which got two tokens or ended."""
        self._evidence.pop(request_id, None)

    def on_death(self, death: Death, unproven: Collection[str]) -> str | None:
        """Holds a death against the `unproven` requests: those being computed that had not got two tokens.

        Returns the guilty one, if there is one. The newest suspects are tried first: they are the likeliest.
        """
        blamed = {name: self._evidence.get(name, 0) + self._weight(death, name) for name in unproven}
        self._evidence = blamed | {name: evidence for name, evidence in self._evidence.items() if name not in blamed}
        guilty = next((name for name, evidence in blamed.items() if evidence >= _GUILTY), None)
        if guilty is not None:
            self.clear(guilty)
        return guilty

    def _weight(self, death: Death, name: str) -> int:
        if len(death.computed) != 1:
            return 0
        if not death.may_be_from_outside:
            return _CRASH
        return _KILL_ON_TRIAL if name == self.on_trial else 0
