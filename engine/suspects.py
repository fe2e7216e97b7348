"""Which requests may have killed the engine, and which one did; torch-free."""

from collections.abc import Collection

_MAX_DEATHS_ALONE = 2


class Suspects:
    """The rule by which a request is found guilty, and an innocent one never is:

    - A death is held against the requests that the engine was computing when it died and that had not got two tokens
      from that engine process yet. (Two, because a request that goes on gets its first from prefill: only the second
      shows that decode survives it, too.) Who got two is innocent of this death.
    - Those it is held against are suspects. The next engine process computes them before all others and one at a time:
      the next begins when the one before got two tokens, and is cleared by that, or ended.
    - A request is guilty when the engine died twice while it computed nothing else, with no two tokens in between.

    So a request that kills is alone after one death or two, and refused two deaths later. One that merely was there
    when something else killed the engine passes its trial. So does a victim of kills from outside: two of them would
    have to hit it, alone, within its first two tokens after a restart.
    """

    def __init__(self) -> None:
        self._deaths_alone: dict[str, int] = {}  # of each suspect, in the order of their trials

    def __len__(self) -> int:
        return len(self._deaths_alone)

    @property
    def on_trial(self) -> str | None:
        """The suspect whose turn it is; nothing else may start. None when all may."""
        return next(iter(self._deaths_alone), None)

    def clear(self, request_id: str) -> None:
        """It got two tokens, or ended."""
        self._deaths_alone.pop(request_id, None)

    def on_death(self, unproven: Collection[str], was_alone: bool) -> str | None:
        """The engine died computing these requests without two tokens, alone if nothing else was computed.

        Returns the guilty one, if there is one. The newest suspects are tried first: they are the likeliest.
        """
        blamed = {request_id: self._deaths_alone.get(request_id, 0) + was_alone for request_id in unproven}
        self._deaths_alone = blamed | {name: n for name, n in self._deaths_alone.items() if name not in blamed}
        guilty = next((name for name, num_deaths in blamed.items() if num_deaths >= _MAX_DEATHS_ALONE), None)
        if guilty is not None:
            self.clear(guilty)
        return guilty
