"""Replicas behind a router, in virtual time: arrivals, steps, deaths and restarts are events in one queue."""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from engine.core.messages import RequestUpdate
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.scheduling.prefix_cache import PrefixCache
from server.routing.policy import RoutedPrompt, RoutingPolicy
from tools.simulate.replica import ReplicaSettings, SimulatedReplica
from tools.simulate.results import Results
from tools.simulate.trace import Session

Event = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    num_replicas: int
    replica: ReplicaSettings = field(default_factory=ReplicaSettings)
    report_s: float = 0.5
    """Time between two reports of a replica's load to the router."""
    num_deaths: int = 0
    deaths_until_s: float = 0.0
    """Replicas die at random times from 0 until then."""
    notice_s: float = 0.1
    """Time between a replica's death and the moment at which its requests are sent elsewhere."""
    restart_s: float = 30.0


@dataclass(slots=True)
class Live:
    """One request between its arrival and its end."""

    session: Session
    turn: int
    request: Request
    """As the replica has it that is at it now."""
    arrival_s: float
    last_token_s: float | None = None


class Cluster:
    """Runs a trace to its end. The router knows what a real one does: what it sent, and reports."""

    def __init__(self, settings: ClusterSettings, policy: RoutingPolicy, trace: Iterator[Session], seed: int) -> None:
        self.results = Results()
        self._settings = settings
        self._policy = policy
        self._trace = trace
        self._hasher = PrefixCache(settings.replica.block_size)
        self._hashes: dict[int, list[bytes]] = {}  # of each session's tokens so far: they need not be computed again
        self._now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._num_events = 0
        self._replicas: dict[str, SimulatedReplica] = {}
        self._reported_s: dict[str, float] = {}
        self._live: dict[str, Live] = {}
        self._homeless: list[Live] = []  # there was no replica for them
        self._num_started = 0
        self._num_due = 0  # turns of sessions so far that have not arrived
        for _ in range(settings.num_replicas):
            self._start_replica()
        draw = random.Random(seed)
        for _ in range(settings.num_deaths):
            self._at(draw.uniform(0, settings.deaths_until_s), partial(self._kill, draw.random()))

    def run(self) -> Results:
        """Runs until every request has ended."""
        self._await_next_session()
        while self._live or self._homeless or self._num_due:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        for replica in self._replicas.values():
            self._count(replica)
        self.results.end_s = self._now_s
        return self.results

    # Requests.

    def _await_next_session(self) -> None:
        session = next(self._trace, None)
        if session is not None:
            self._num_due += len(session.turns)
            self._at(session.start_s, lambda: self._start_session(session))

    def _start_session(self, session: Session) -> None:
        self._hashes[session.number] = []
        self._arrive(session, 0)
        self._await_next_session()

    def _arrive(self, session: Session, turn: int) -> None:
        self._num_due -= 1
        name = f"{session.number}/{turn}"
        request = self._request(name, session, turn, [])
        live = self._live[name] = Live(session, turn, request, self._now_s)
        self._send(live)

    def _request(self, name: str, session: Session, turn: int, output: list[int]) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=session.prompt(turn),
            params=SamplingParams(max_tokens=session.turns[turn].num_output),
            arrival_s=self._now_s,
            output_token_ids=output,
            block_hashes=self._hashes[session.number],
        )
        self._hasher.hashes(request, request.num_tokens // self._settings.replica.block_size)
        return request

    def _send(self, live: Live) -> None:
        prompt = RoutedPrompt(
            digests=tuple(live.request.block_hashes),
            num_tokens=live.request.num_tokens,
            piece_tokens=self._settings.replica.block_size,
            key=str(live.session.number) if live.session.has_key else "",
        )
        chosen = self._policy.choose(prompt)
        self._note(live.request.request_id, chosen)
        if chosen is None:
            self._homeless.append(live)
            return
        self._policy.sent(prompt, chosen)
        replica = self._replicas[chosen]
        replica.add(live.request)
        self._step(replica)

    def _on_update(self, update: RequestUpdate) -> None:
        live = self._live[update.request_id]
        if live.last_token_s is None:
            self.results.ttft.add(self._now_s - live.arrival_s)
        else:
            self.results.itl.add(self._now_s - live.last_token_s)
        live.last_token_s = self._now_s
        self.results.num_sampled += len(update.token_ids)
        if update.finish_reason is not None:
            self._finish(live)

    def _finish(self, live: Live) -> None:
        session, output = live.session, live.request.output_token_ids
        del self._live[live.request.request_id]
        self._note(live.request.request_id, "ended")
        self.results.num_requests += 1
        self.results.num_output_tokens += len(output)
        self.results.num_wrong += output != session.answer(live.turn)
        if (turn := live.turn + 1) < len(session.turns):
            self._at(self._now_s + session.turns[turn].pause_s, lambda: self._arrive(session, turn))
        else:
            del self._hashes[session.number]

    # Replicas.

    def _start_replica(self) -> None:
        name = f"r{self._num_started}"
        self._num_started += 1
        self._replicas[name] = SimulatedReplica(name, self._settings.replica)
        self._reported_s[name] = self._now_s
        self._policy.add(name)
        homeless, self._homeless = self._homeless, []
        for live in homeless:
            self._send(live)

    def _step(self, replica: SimulatedReplica) -> None:
        """Begins a step of a replica that is between two."""
        if not replica.is_stepping and (end_s := replica.begin_step(self._now_s)) is not None:
            self._at(end_s, lambda: self._end_step(replica))

    def _end_step(self, replica: SimulatedReplica) -> None:
        if self._replicas.get(replica.name) is not replica:
            return  # it died during the step, whose tokens nobody got
        for update in replica.end_step():
            self._on_update(update)
        if self._now_s >= self._reported_s[replica.name] + self._settings.report_s:
            self._reported_s[replica.name] = self._now_s
            self._policy.report(replica.name, replica.load)
        self._step(replica)

    def _kill(self, number: float) -> None:
        """Ends one of the replicas. The router notices a moment later."""
        names = list(self._replicas)
        if not names:
            return
        replica = self._replicas.pop(names[int(number * len(names))])
        self._count(replica)
        self._policy.remove(replica.name)
        for request in replica.requests.values():
            self._at(self._now_s + self._settings.notice_s, partial(self._move, request.request_id))
        self._at(self._now_s + self._settings.restart_s, self._start_replica)

    def _move(self, name: str) -> None:
        """Has a request go on elsewhere: with its prompt, and the tokens so far."""
        live = self._live[name]
        live.request = self._request(name, live.session, live.turn, live.request.output_token_ids)
        self.results.num_moved += 1
        self._send(live)

    def _count(self, replica: SimulatedReplica) -> None:
        self.results.prefix_queries += replica.stats.prefix_queries
        self.results.prefix_hits += replica.stats.prefix_hits
        self.results.num_preemptions += replica.stats.num_preemptions

    # Time.

    def _at(self, time_s: float, event: Event) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, event))

    def _note(self, request_id: str, what: str | None) -> None:
        self.results.decisions.update(f"{self._now_s!r} {request_id} {what}\n".encode())
