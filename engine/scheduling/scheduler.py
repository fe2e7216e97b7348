"""Decides which requests compute which tokens in the next step, which is either prefill or decode; torch-free.

Decode has priority: whenever requests are decoding, a decode step runs, and between two decode steps at most one
prefill step, as long as `PrefillPace` allows. With nothing decoding, prefill takes its full budget.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from engine.core.batch import Batch, Phase, RequestStepOutput, ScheduledRequest, StepOutput
from engine.core.messages import RequestState, RequestUpdate
from engine.core.prompt_logprobs import pack_scores
from engine.core.request import Constraint, Request, RequestStatus
from engine.core.stats import SchedulerStats
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.fair_turns import FairTurns
from engine.scheduling.kv_allocator import KVAllocator
from engine.scheduling.loading import LoadingRequests
from engine.scheduling.output_tokens import append_tokens, why_no_token
from engine.scheduling.prefill_budget import PrefillBudget, PrefillPace
from engine.scheduling.request_reports import failure_of, state_of, update_of
from engine.scheduling.request_shares import chunk_share, drafted_share, share_of
from engine.scheduling.speculation.draft_verification import end_of_draft_kv
from engine.scheduling.speculation.planner import SpeculationPlanner


class Scheduler:
    """Owns every unfinished request. A tenant's requests run first come, first served within equal `priority`."""

    def __init__(
        self,
        kv: KVAllocator,
        pace: PrefillPace,
        speculation: SpeculationPlanner,
        *,
        max_num_seqs: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._kv = kv
        self._pace = pace
        self._speculation = speculation
        self._max_num_seqs = max_num_seqs
        self._eos_token_ids = eos_token_ids
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._waiting = FairQueue()
        self._turns = FairTurns(self._waiting, max_num_seqs, kv.num_blocks)
        self._running: list[Request] = []  # in their order
        self._loading = LoadingRequests(kv, self._waiting)
        self._last_phase: Phase | None = None
        self.newly_scheduled: list[str] = []
        """Ids of requests that the newest `schedule` ran for the first time."""
        self._num_preemptions = 0
        self._prefill_saved_s = 0.0

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._loading),
            pool=self._kv.stats,
            num_preemptions=self._num_preemptions,
            prefix_queries=self._kv.prefix_queries,
            prefix_hits=self._kv.prefix_hits,
            num_drafts=self._speculation.num_drafts,
            num_accepted_drafts=self._speculation.num_accepted,
            prefix_disk_hits=self._kv.prefix_disk_hits,
            prefix_disk_declined=self._kv.prefix_disk_declined,
            prefill_saved_s=self._prefill_saved_s,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def kv(self) -> KVAllocator:
        return self._kv

    @property
    def running_ids(self) -> list[str]:
        return [request.request_id for request in self._running]

    def add(self, request: Request) -> None:
        """Queue a request that can fit: prompt and max_tokens within the context and within the whole pool."""
        assert request.request_id not in self._requests, f"request id {request.request_id} is in use"
        self._requests[request.request_id] = request
        request.number = self._num_added
        self._num_added += 1
        self._waiting.add(request)

    def has(self, request_id: str) -> bool:
        return request_id in self._requests

    def uses_adapter(self, number: int) -> bool:
        """Whether any unfinished request runs with the adapter of this number."""
        return any(each.adapter is not None and each.adapter.number == number for each in self._requests.values())

    def constraint_of(self, request_id: str) -> Constraint | None:
        return self._requests[request_id].constraint

    def inspect(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Returns the states of the unfinished requests among `request_ids`."""
        return [state_of(self._requests[each], self._waiting) for each in request_ids if each in self._requests]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End the unfinished requests among `request_ids`, at any moment between steps."""
        for request in [self._requests[each] for each in dict.fromkeys(request_ids) if each in self._requests]:
            self._finish(request)

    def set_stalled(self, request_id: str, is_stalled: bool) -> None:
        """Note whether an unfinished request's reader has stopped reading: then it makes room for all others."""
        if (request := self._requests.get(request_id)) is not None:
            self._waiting.set_stalled(request, is_stalled)

    def schedule(self, now_s: float) -> Batch | None:
        """Returns the next step's batch, with blocks allocated for its tokens, or None when there is no work."""
        self._kv.begin_step(now_s)
        self._loading.requeue(now_s)
        decoding = [request for request in self._running if not request.needs_prefill]
        self.newly_scheduled = []
        batch = None
        if not decoding:
            budget = self._pace.while_none_decodes(is_shared=self._waiting.has_several_tenants)
            batch = self._schedule_prefill(budget, now_s)
        elif self._last_phase is Phase.DECODE:
            batch = self._schedule_prefill(self._pace.within_a_gap(decoding), now_s)
        batch = batch or self._schedule_decode()
        self._last_phase = batch.phase if batch else None
        if transfers := self._kv.take_transfers():
            batch = replace(batch or Batch(Phase.PREFILL, ()), transfers=transfers)
        return batch

    def update(self, batch: Batch, output: StepOutput) -> list[RequestUpdate]:
        """Account for a finished step and return each request's update. No request is aborted during a step, but
        nothing here depends on that."""
        self._speculation.on_step(batch.num_drafts)
        updates = []
        for scheduled, result in zip(batch.requests, output.requests, strict=True):
            request = self._requests.get(scheduled.request_id)
            if request is None:
                continue  # aborted since
            if result.prompt_logprobs:
                request.prompt_logprobs += pack_scores(result.prompt_logprobs)
            if scheduled.samples:
                updates.append(self._append(request, scheduled, result))
            else:
                self._mark_computed(request, scheduled, scheduled.end)
        return updates

    def fail(self, batch: Batch, message: str) -> list[RequestUpdate]:
        """End a batch's requests because its step raised."""
        live = [self._requests[each.request_id] for each in batch.requests if each.request_id in self._requests]
        return [self._fail(request, message) for request in live]

    def _fail(self, request: Request, message: str, blames_request: bool = False) -> RequestUpdate:
        self._finish(request)
        return failure_of(request, message, blames_request)

    # Decode: one token, and draft tokens, for every running request whose other tokens all have KV.

    def _schedule_decode(self) -> Batch | None:
        ready = self._with_blocks([request for request in self._running if not request.needs_prefill])
        # Without requests there is nothing to draft, and a gap that holds a prefill step has no time for drafts.
        if not ready or self._last_phase is Phase.PREFILL:
            return _batch(Phase.DECODE, [share_of(self._kv, request, 1) for request in ready])
        plans, spare = self._speculation.plan(ready), len(self._running)
        shares = [drafted_share(self._kv, *each, spare) for each in zip(ready, plans, strict=True)]
        return _batch(Phase.DECODE, shares)

    def _with_blocks(self, requests: Sequence[Request]) -> list[Request]:
        """Gives running requests the blocks that they need in the next step, preempting until they are there, and
        returns those that still run."""
        for request in requests:
            while request.status is RequestStatus.RUNNING and not self._kv.try_allocate(request):
                self._preempt(self._turns.first_to_go(self._running))
        return [request for request in requests if request.status is RequestStatus.RUNNING]

    def _schedule_prefill(self, budget: PrefillBudget, now_s: float) -> Batch | None:
        """Starts tenants that are behind, in a short step of their own; else chunks in progress come first."""
        begun = [request for request in self._running if request.needs_prefill]
        chunks = self._start_some(budget, begun, now_s)
        if begun and not chunks:
            begun = self._with_blocks(begun)
            chunks = [(request, budget.take(request)) for request in begun if budget.can_continue(request)]
            chunks += self._start_some(budget, [], now_s)
        return _batch(Phase.PREFILL, [chunk_share(self._kv, *chunk) for chunk in chunks])

    def _start_some(self, budget: PrefillBudget, before: Sequence[Request], now_s: float) -> list[tuple[Request, int]]:
        """Starts waiting requests, and returns their chunks: of tenants that are behind those of all in `before`."""
        chunks: list[tuple[Request, int]] = []
        while not budget.is_spent and len(self._loading) < max(1, self._max_num_seqs - len(self._running)):
            if (new := self._waiting.next(self._running)) is None or not self._waiting.goes_before(new, before):
                break
            if self._loading.try_add(new, len(self._running), now_s):
                continue
            if not self._try_admit_in_turn(new, now_s):
                break
            if new.needs_prefill:  # else all its KV but one token's was cached: it decodes
                chunks.append((new, budget.take(new)))
        return chunks

    def _try_admit_in_turn(self, request: Request, now_s: float) -> bool:
        """Does what `_try_admit` does; where there is no room, requests that need it less make some."""
        while len(self._running) >= self._max_num_seqs or not self._try_admit(request, now_s):
            victim = self._turns.victim(request, self._running)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _try_admit(self, request: Request, now_s: float) -> bool:
        """Move the next waiting request to running with blocks for all its tokens, if they can be had.

        One available block is spared per running request, so that admission does not force the next preemption.
        """
        if not self._kv.try_start(request, self._kv.match(request), spare=len(self._running)):
            return False
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.turn_start = len(request.output_token_ids)
        insort(self._running, request, key=attrgetter("order"))
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            self.newly_scheduled.append(request.request_id)
            request.num_cached_tokens = request.num_computed_tokens
            self._prefill_saved_s += self._pace.saving(request.num_computed_tokens)
            self._waiting.start(request, request.num_uncomputed_tokens)
        return True

    def _mark_computed(self, request: Request, scheduled: ScheduledRequest, end: int) -> None:
        """Records that the step computed the request's own tokens before `end`."""
        self._kv.computed(request, scheduled.start, end)
        if scheduled.draft_span:
            self._kv.drafted(request, scheduled.draft_span[1], end_of_draft_kv(scheduled, end))
        if not request.is_announced:
            request.num_prefill_chunks += 1

    def _append(self, request: Request, scheduled: ScheduledRequest, result: RequestStepOutput) -> RequestUpdate:
        """Append the sampled tokens up to the first that finishes the request, and report them."""
        appended = append_tokens(request, result.token_ids, self._eos_token_ids)
        num_accepted = max(len(appended.token_ids) - 1, 0)
        self._mark_computed(request, scheduled, scheduled.end - scheduled.num_drafts + num_accepted)
        self._kv.trim(request)
        self._speculation.learn(request, scheduled, result.token_ids, num_accepted)
        if not result.is_finite or (not result.token_ids and appended.finish_reason is None):
            return self._fail(request, *why_no_token(request, result.is_finite))
        self._waiting.charge(request, len(appended.token_ids))
        if appended.finish_reason is not None:
            self._finish(request)
        return update_of(request, appended, result)

    def _preempt(self, request: Request) -> None:
        """Move a running request back to its old place in the queue; its tokens are computed again."""
        self._running.remove(request)
        self._kv.free(request)
        request.status, request.num_loads = RequestStatus.WAITING, 0
        request.prompt_logprobs.clear()
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.add(request)

    def _finish(self, request: Request) -> None:
        """End a request and free what it holds; every request passes here exactly once."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.LOADING:
            self._loading.remove(request)
        else:
            self._waiting.remove(request)
        self._kv.free(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]


def _batch(phase: Phase, requests: list[ScheduledRequest]) -> Batch | None:
    return Batch(phase, tuple(requests)) if requests else None
