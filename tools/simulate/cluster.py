"""Replicas behind a router, in virtual time: arrivals, steps, deaths and restarts are events in one queue."""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from engine.core.generation_request import GenerationRequest
from engine.core.messages import RequestUpdate
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.scheduling.prefix_cache import PrefixCache
from server.routing.policy import LeastLoadedPolicy, RoutedPrompt, RoutingPolicy
from tools.simulate.kv_store import SharedStore
from tools.simulate.replica import ReplicaSettings, SimulatedReplica
from tools.simulate.results import Results
from tools.simulate.stretches import Stretch
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
    num_prefill: int = 0
    """How many of the replicas do nothing but compute prompts for the others."""
    has_store: bool = False
    """Whether replicas share a KV store, as they do where some of them compute prompts for others."""
    prefill_min_tokens: int = 256
    """Tokens to compute from which on a prompt is asked for."""
    hop_s: float = 2e-3
    """Time that asking for a prompt takes, beside computing and copying it."""
    good_ttft_s: float = 0.5
    good_tpot_s: float = 0.03
    """Requests count as good up to this time to their first token, and up to this mean of their gaps."""
    step_by_step: bool = False
    """Whether each step is run by itself, which takes longer and changes nothing."""


@dataclass(slots=True)
class Live:
    """One request between its arrival and its end."""

    session: Session
    turn: int
    request: Request
    """The request as the replica has it that is at it now."""
    arrival_s: float
    first_token_s: float = 0.0
    last_token_s: float | None = None
    replica: str = ""
    """Name of the replica that it was sent to last."""
    asked: str = ""
    """The replica that computes its prompt for that one."""


class Cluster:
    """Runs a trace to its end. The router knows what a real one does: what it sent, and reports."""

    def __init__(
        self,
        settings: ClusterSettings,
        policy: RoutingPolicy,
        trace: Iterator[Session],
        seed: int,
        prefill_policy: RoutingPolicy | None = None,
    ) -> None:
        """`prefill_policy` chooses among the replicas that compute prompts for others, if there are any."""
        self.results = Results()
        self._settings = settings
        self._policy = policy
        self._prefill_policy = prefill_policy or LeastLoadedPolicy()
        self._prefill_names: set[str] = set()
        self._store = SharedStore() if settings.has_store or settings.num_prefill else None
        self._trace = trace
        self._hasher = PrefixCache(settings.replica.block_size)
        self._hashes: dict[int, list[bytes]] = {}  # of each session's tokens so far: they need not be computed again
        self._now_s = 0.0
        self._events: list[tuple[float, str, int, Event]] = []  # of one time: others before steps, by their replicas
        self._num_events = 0
        self._replicas: dict[str, SimulatedReplica] = {}
        self._reported_s: dict[str, float] = {}
        self._live: dict[str, Live] = {}
        self._homeless: list[Live] = []  # there was no replica for them
        self._num_started = 0
        self._num_due = 0  # turns of sessions so far that have not arrived
        self._progress: Callable[[int], None] = lambda num_ended: None
        for number in range(settings.num_replicas):
            self._start_replica(is_prefill=number < settings.num_prefill)
        draw = random.Random(seed)
        for _ in range(settings.num_deaths):
            self._at(draw.uniform(0, settings.deaths_until_s), partial(self._kill, draw.random()))

    def run(self, progress: Callable[[int], None] | None = None) -> Results:
        """Runs until every request has ended. `progress` hears with each that ends how many have."""
        self._progress = progress or self._progress
        self._await_next_session()
        while self._live or self._homeless or self._num_due:
            self._now_s, *_, event = heapq.heappop(self._events)
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
            name,
            self._asked(session.prompt(turn), session.turns[turn].num_output),
            output_token_ids=output,
            block_hashes=self._hashes[session.number],
        )
        self._hasher.hashes(request, request.num_tokens // self._settings.replica.block_size)
        return request

    def _asked(self, token_ids: list[int], max_tokens: int, until_stored: bool = False) -> GenerationRequest:
        return GenerationRequest(
            prompt_token_ids=token_ids,
            params=SamplingParams(max_tokens=max_tokens),
            arrival_s=self._now_s,
            until_stored=until_stored,
        )

    def _send(self, live: Live) -> None:
        prompt = self._routed(live.request, str(live.session.number) if live.session.has_key else "")
        chosen = self._policy.choose(prompt)
        self._note(live.request.request_id, chosen)
        if chosen is None:
            self._homeless.append(live)
            return
        self._policy.sent(prompt, chosen)
        live.replica = chosen
        self._replicas[chosen].hold(live.request)
        self._ask(live, live.request)

    def _routed(self, request: Request, key: str = "") -> RoutedPrompt:
        piece_tokens = self._settings.replica.block_size
        return RoutedPrompt(tuple(request.block_hashes), request.num_tokens, piece_tokens, key)

    # Prompts that other replicas compute.

    def _ask(self, live: Live, request: Request) -> None:
        """Has a prefill replica compute the prompt of a request that its own replica holds; where that is not worth it,
        or there is none, the request begins."""
        replica = self._replicas.get(live.replica)
        if replica is None or live.request is not request:
            return  # it goes on elsewhere
        num_left = request.num_tokens - replica.num_found(request) if self._prefill_names else 0
        if num_left < max(self._settings.prefill_min_tokens, 1):
            self._begin(live, request, 0)
            return
        prefix = self._prefix(request)
        prompt = self._routed(prefix)
        live.asked = chosen = self._prefill_policy.choose(prompt) or ""
        self._note(request.request_id, chosen)
        self._prefill_policy.sent(prompt, chosen)
        self._replicas[chosen].add(prefix)
        self._step(self._replicas[chosen])

    def _prefix(self, request: Request) -> Request:
        """Returns the request for the full blocks of a prompt and the next token, as decode servers send it."""
        num_blocks = (request.num_tokens - 1) // self._settings.replica.block_size
        end = num_blocks * self._settings.replica.block_size + 1
        return Request(
            request.request_id,
            self._asked([*request.asked.prompt_token_ids, *request.output_token_ids][:end], 1, until_stored=True),
            block_hashes=request.block_hashes[:num_blocks],
        )

    def _on_stored(self, update: RequestUpdate) -> None:
        live = self._live[update.request_id]
        live.asked = ""
        self.results.num_handed_over += 1
        begin = partial(self._begin, live, live.request, update.num_stored_tokens)
        self._at(self._now_s + self._settings.hop_s, begin)

    def _begin(self, live: Live, request: Request, num_stored_tokens: int) -> None:
        replica = self._replicas.get(live.replica)
        if replica is None or live.request is not request:
            return  # it goes on elsewhere
        request.num_announced_tokens = num_stored_tokens
        if (end_s := replica.cut_stretch(self._now_s)) is not None:
            self._at(end_s, lambda: self._end_step(replica), replica.name)
        replica.release(request)
        self._step(replica)

    # Tokens.

    def _on_update(self, update: RequestUpdate) -> None:
        live = self._live[update.request_id]
        if live.last_token_s is None:
            self.results.ttft.add(self._now_s - live.arrival_s)
            live.first_token_s = self._now_s
        else:
            self.results.itl.add(self._now_s - live.last_token_s)
        live.last_token_s = self._now_s
        self.results.num_sampled += len(update.token_ids)
        if update.finish_reason is not None:
            self._finish(live)

    def _on_stretch(self, stretch: Stretch) -> None:
        for request in stretch.requests:
            live = self._live[request.request_id]
            assert live.last_token_s is not None
            self.results.itl.add(stretch.ends_s[0] - live.last_token_s)
            live.last_token_s = stretch.ends_s[-1]
        for before_s, end_s in pairwise(stretch.ends_s):
            self.results.itl.add(end_s - before_s, len(stretch.requests))
        self.results.num_sampled += len(stretch) * len(stretch.requests)

    def _finish(self, live: Live) -> None:
        session, output = live.session, live.request.output_token_ids
        del self._live[live.request.request_id]
        self._note(live.request.request_id, "ended")
        self.results.num_requests += 1
        self.results.num_output_tokens += len(output)
        ttft_s = live.first_token_s - live.arrival_s
        tpot_s = (self._now_s - live.first_token_s) / max(len(output) - 1, 1)
        self.results.num_good += ttft_s <= self._settings.good_ttft_s and tpot_s <= self._settings.good_tpot_s
        self.results.num_wrong += output != session.answer(live.turn)
        self._progress(self.results.num_requests)
        if (turn := live.turn + 1) < len(session.turns):
            self._at(self._now_s + session.turns[turn].pause_s, lambda: self._arrive(session, turn))
        else:
            del self._hashes[session.number]

    # Replicas.

    def _start_replica(self, is_prefill: bool = False) -> None:
        name = f"{'p' if is_prefill else 'r'}{self._num_started}"
        self._num_started += 1
        self._replicas[name] = SimulatedReplica(name, self._settings.replica, self._store)
        self._reported_s[name] = self._now_s
        if is_prefill:
            self._prefill_names.add(name)
        self._policy_of(name).add(name)
        homeless, self._homeless = self._homeless, []
        for live in homeless:
            self._send(live)

    def _policy_of(self, replica: str) -> RoutingPolicy:
        return self._prefill_policy if replica in self._prefill_names else self._policy

    def _step(self, replica: SimulatedReplica) -> None:
        """Begins a step of a replica that is between two; where there is none, waits for copies under way."""
        if replica.is_stepping or self._replicas.get(replica.name) is not replica:
            return
        self._tell(replica, replica.end_copies(self._now_s))
        if (end_s := self._begin_steps(replica)) is not None:
            self._at(end_s, lambda: self._end_step(replica), replica.name)
        elif (next_s := replica.next_copy_s) is not None:
            self._at(next_s, lambda: self._step(replica), replica.name)

    def _begin_steps(self, replica: SimulatedReplica) -> float | None:
        end_s = None
        if not self._settings.step_by_step:
            end_s = replica.try_begin_stretch(self._now_s, self._report_due_s(replica))
        return replica.begin_step(self._now_s) if end_s is None else end_s

    def _report_due_s(self, replica: SimulatedReplica) -> float:
        return self._reported_s[replica.name] + self._settings.report_s

    def _tell(self, replica: SimulatedReplica, updates: list[RequestUpdate]) -> None:
        if not updates:
            return
        tell = self._on_stored if replica.name in self._prefill_names else self._on_update
        for update in updates:
            tell(update)

    def _end_step(self, replica: SimulatedReplica) -> None:
        if self._replicas.get(replica.name) is not replica or replica.step_end_s != self._now_s:
            return  # it died during the step, whose tokens nobody got; or the stretch was cut, and ended before
        if (stretch := replica.end_stretch()) is not None:
            self._on_stretch(stretch)
        else:
            self._tell(replica, replica.end_step())
        if self._now_s >= self._report_due_s(replica):
            self._reported_s[replica.name] = self._now_s
            self._policy_of(replica.name).report(replica.name, replica.load)
        self._step(replica)

    def _kill(self, number: float) -> None:
        """Ends one of the replicas. The router notices a moment later."""
        names = list(self._replicas)
        if not names:
            return
        replica = self._replicas.pop(names[int(number * len(names))])
        if (stretch := replica.end_stretch(self._now_s)) is not None:
            self._on_stretch(stretch)
        self._count(replica)
        self._policy_of(replica.name).remove(replica.name)
        is_prefill = replica.name in self._prefill_names
        self._prefill_names.discard(replica.name)
        for request_id in replica.requests:
            self._at(self._now_s + self._settings.notice_s, self._after_death(self._live[request_id], is_prefill))
        self._at(self._now_s + self._settings.restart_s, partial(self._start_replica, is_prefill))

    def _after_death(self, live: Live, of_prefill: bool) -> Event:
        """Returns what becomes of a request whose replica died, or the one that computed its prompt."""
        asked, live.asked = live.asked, ""
        if of_prefill:
            return partial(self._ask, live, live.request)
        if asked in self._replicas:
            self._replicas[asked].abort(live.request.request_id)
        return partial(self._move, live.request.request_id)

    def _move(self, name: str) -> None:
        """Has a request go on elsewhere: with its prompt, and the tokens so far."""
        live = self._live[name]
        live.request = self._request(name, live.session, live.turn, live.request.output_token_ids)
        self.results.num_moved += 1
        self._send(live)

    def _count(self, replica: SimulatedReplica) -> None:
        """Counts what a replica did. What one computed for another is a hit there, and none at all."""
        stats = replica.stats
        if replica.name in self._prefill_names:
            self.results.prefix_hits -= stats.prefix_queries - stats.prefix_hits
        else:
            self.results.prefix_queries += stats.prefix_queries
            self.results.prefix_hits += stats.prefix_hits
        self.results.num_preemptions += stats.num_preemptions

    # Time.

    def _at(self, time_s: float, event: Event, stepping: str = "") -> None:
        """`stepping` is the replica whose step it is, if any."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, stepping, self._num_events, event))

    def _note(self, request_id: str, what: str | None) -> None:
        self.results.decisions.update(f"{self._now_s!r} {request_id} {what}\n".encode())
