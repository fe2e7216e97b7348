"""The request registry: all live requests, and which of them the engine process knows. Each process is sent a request
once; the successor of one that died is sent it again."""

from collections.abc import Callable, Iterable, Iterator

from engine.client.live_request import LiveRequest, TimedUpdate
from engine.core.errors import EngineFailedError, TwostepError
from engine.core.messages import AddRequest, ComputedSpan, MarkStalled
from engine.core.stats import StepShare
from engine.process.poison_requests import Death, PoisonRequests

NO_DEATH = Death()


class RequestRegistry:
    """All live requests in order of arrival. They wait here while no engine process is up, or a suspect is on trial."""

    def __init__(self, send: Callable[[AddRequest | MarkStalled], None], on_work: Callable[[], None]) -> None:
        """`on_work` is called when there is a request for the engine after there was none."""
        self._send = send
        self._on_work = on_work
        self._live: dict[str, LiveRequest] = {}  # by the engine's id
        self._suspects = PoisonRequests()
        self._is_up = False

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    @property
    def num_begun(self) -> int:
        return sum(live.has_begun for live in self)

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    def group(self, tenant: str, client_request_id: str | None = None) -> list[LiveRequest]:
        """Returns the tenant's requests, of this group or of all, that still want tokens."""
        return [live for live in self if live.is_of(tenant, client_request_id) and not live.is_complete]

    def add(self, live: LiveRequest) -> None:
        self._live[live.engine_id] = live
        live.on_stall = self._report_stall
        self.release(live)

    def release(self, live: LiveRequest) -> None:
        """Sends a request to the engine, unless it is held. To be called again when it is held no more."""
        if not live.is_held and all(other.is_held for other in self if other is not live):
            self._on_work()
        self._hand_over(live)

    @property
    def has_work(self) -> bool:
        """Whether there is a request for the engine: one that is not held."""
        return any(not live.is_held for live in self)

    def remove(self, live: LiveRequest) -> bool:
        """Remove a request that ended; False if it was removed before."""
        if self._live.pop(live.engine_id, None) is None:
            return False
        self.advance_trials()
        return True

    def on_scheduled(self, engine_ids: Iterable[str]) -> None:
        for engine_id in engine_ids:
            if engine_id in self._live:
                self._live[engine_id].timeouts.on_scheduled()

    def on_unscheduled(self) -> None:
        """Restart the queue timeouts of requests without a token that still want one: they wait again."""
        for live in self:
            if not live.has_begun and not live.is_complete and not live.is_held:
                live.timeouts.on_unscheduled()

    def put(self, engine_id: str, item: TimedUpdate | TwostepError) -> None:
        live = self._live.get(engine_id)
        if live is not None:  # else it ended here, and the engine does not know yet
            live.put(item)

    def shares_of(self, computed: Iterable[ComputedSpan]) -> tuple[StepShare, ...]:
        """Returns what a step computed of requests that are live, with whose they are."""
        found = ((self._live.get(span.request_id), span) for span in computed)
        return tuple(
            StepShare(live.request.tenant, live.request.client_request_id, span.start, span.end)
            for live, span in found
            if live is not None
        )

    def _report_stall(self, live: LiveRequest) -> None:
        if live.is_known_to_engine:
            self._send(MarkStalled(live.engine_id, live.is_stalled))

    def engine_is_down(self) -> None:
        self._is_up = False
        for live in self:
            live.is_known_to_engine = False

    def engine_is_up(self, death: Death = NO_DEATH) -> str | None:
        """Send the new process all requests, or only the first suspect. `death` is that of the process before. Returns
        the request that is guilty of it, if there is one, which has failed."""
        unproven = [name for name in death.computed if name in self._live and not self._live[name].is_proven]
        guilty = self._suspects.on_death(death, unproven)
        if guilty is not None:
            self.put(
                guilty,
                EngineFailedError(f"The engine died again and again computing request {guilty} and nothing else."),
            )
        self._is_up = True
        self._hand_over_all()
        self.advance_trials()
        return guilty

    def advance_trials(self) -> None:
        """Send the next suspect when a trial is over, and all requests after the last. Call after updates and ends."""
        while (on_trial := self._suspects.on_trial) is not None and self._is_over(on_trial):
            self._suspects.clear(on_trial)
            self._hand_over_all()

    def _is_over(self, on_trial: str) -> bool:
        live = self._live.get(on_trial)
        return live is None or live.is_complete or (live.is_known_to_engine and live.is_proven)

    def _hand_over_all(self) -> None:
        for live in self:
            self._hand_over(live)

    def _hand_over(self, live: LiveRequest) -> None:
        may_start = self._is_up and not live.is_held and self._suspects.on_trial in (None, live.engine_id)
        if not may_start or live.is_known_to_engine or live.is_complete:
            return
        try:
            self._send(live.hand_over())
        except Exception as error:  # text that is no Unicode, say: it must not take others with it
            live.put(EngineFailedError(f"The request cannot be given to the engine: {error}"))
