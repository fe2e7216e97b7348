"""The engine: schedule, run, update. Synchronous, token ids only; usable in-process or behind `engine.process`."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.core.batch import Batch, Phase, ScheduledRequest, StepOutput
from engine.core.config import EngineConfig, EngineInfo
from engine.core.draft import Drafter
from engine.core.errors import InvalidParameterError
from engine.core.marker import Marker, NullMarker
from engine.core.messages import AddRequest, RequestState, RequestUpdate, StepUpdate
from engine.core.request import Request
from engine.core.request_validation import check_request
from engine.core.stats import StepStats
from engine.grammar.compiler import Grammars, NoGrammars, load_grammars
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.cost.roofline import Roofline
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.cost.step_trace import NullTracer, Tracer, open_tracer
from engine.scheduling.prefill_budget import PrefillPace
from engine.scheduling.prefix_cache import BlockCache, NullPrefixCache, PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.draft_length import FastestDraftLength
from engine.scheduling.speculation.draft_verification import shortened
from engine.scheduling.speculation.grammar_drafter import GrammarDrafter
from engine.scheduling.speculation.planner import SpeculationPlanner
from engine.scheduling.speculation.prompt_lookup import PromptLookup

logger = logging.getLogger(__name__)

_MAX_LOGITS = 1 << 26  # of the prompts that a step scores: 256 MB in float32
_MAX_WAIT_S = 0.005  # for a grammar, when there is nothing else to do: messages wait as long


class Runner(Protocol):
    """Computes a batch: the model, or a fake of it."""

    def prefill(self, batch: Batch) -> StepOutput: ...

    def decode(self, batch: Batch) -> StepOutput: ...

    def draft(self, batch: Batch) -> Batch:
        """Returns the batch with the draft tokens that its requests want; called only if there is a draft model."""


class _StepResult(NamedTuple):
    """What a step ran, what it reports, and how long its parts took."""

    batch: Batch | None
    updates: list[RequestUpdate]
    model_s: float = 0.0
    predicted_s: float | None = None
    drafting_s: float = 0.0


class Engine:
    """Runs requests to their end, one step at a time. Not thread-safe: one owner calls every method."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        runner: Runner,
        tracer: Tracer | None = None,
        marker: Marker | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        new_drafter: Callable[[], Drafter] = PromptLookup,
    ) -> None:
        self.info = info
        self._runner = runner
        self._tracer = tracer or NullTracer()
        self._marker = marker or NullMarker()
        self._clock = clock
        self._new_drafter = new_drafter if config.num_speculative_tokens else None
        self._grammars = NoGrammars() if grammars is None else grammars
        cache: BlockCache = PrefixCache(config.block_size) if config.enable_prefix_caching else NullPrefixCache()
        self._pool = BlockPool(info.num_blocks, cache)
        self._costs = StepCosts()
        self._floors = Roofline(info.size, info.ceilings, info.draft_size)
        pace = PrefillPace(
            self._costs,
            target_gap_s=config.target_itl_ms / 1000,
            max_tokens=config.max_num_batched_tokens,
            max_tokens_per_gap=config.max_prefill_tokens_per_gap,
            max_scored_tokens=_MAX_LOGITS // info.vocab_size,
        )
        self._speculation = _new_planner(self._costs, config, info)
        self._scheduler = Scheduler(
            self._pool,
            cache,
            pace,
            self._speculation,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=frozenset(info.eos_token_ids),
        )
        self._has_unreported_aborts = False

    @classmethod
    def from_config(cls, config: EngineConfig, marker: Marker | None = None) -> "Engine":
        """Load the model and size the KV cache. Raises ConfigError or ModelError."""
        # The kernels use their own threads. Those of torch spin after each job, for 13 ms by default, and would take
        # the cores from them: they shall spin for about 1 ms.
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
        cpus = os.sched_getaffinity(0)
        from engine.model.setup import load_model_runner  # torch enters the process only here

        # With OMP_PROC_BIND its library has bound this thread to one CPU, where the kernels' threads would follow it.
        if os.sched_getaffinity(0) != cpus:  # some sandboxes forbid the call
            os.sched_setaffinity(0, cpus)
        runner, info = load_model_runner(config)
        return cls(config, info, runner, open_tracer(config.trace), marker, grammars=load_grammars(config, info))

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self._scheduler.has_unfinished or self._has_unreported_aborts or len(self._grammars) > 0

    def add_request(self, message: AddRequest) -> None:
        """Queue a request. Raises RequestError, and changes nothing, if it can never run."""
        check_request(self.info, message.prompt_token_ids, message.params)
        if not message.weight > 0:
            raise InvalidParameterError("weight", f"weight must be above 0, got {message.weight}.")
        if self._scheduler.has(message.request_id) or message.request_id in self._grammars:
            raise InvalidParameterError("request_id", f"request_id {message.request_id!r} is in use.")
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            params=message.params,
            arrival_s=message.arrival_s,
            priority=message.priority,
            tenant=message.tenant,
            weight=message.weight,
            cache_salt=message.cache_salt,
            output_token_ids=list(message.output_token_ids),  # it grows
            is_announced=bool(message.output_token_ids),
        )
        if request.params.grammar is None:
            self._admit(request)
        else:
            self._grammars.add(request)

    def _admit(self, request: Request) -> None:
        """Queue a request with its drafter. One that another engine process began does not speculate: if a draft killed
        that process, it does not happen again."""
        if self._new_drafter is not None and not request.output_token_ids:
            request.may_speculate, request.drafter = True, self._new_drafter()
            if request.constraint is not None:
                request.drafter = GrammarDrafter(request.constraint.forced_tokens, request.drafter)
        self._scheduler.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without further updates; unknown ids are ignored."""
        ids = list(request_ids)
        self._has_unreported_aborts |= self._grammars.abort(ids) | self._scheduler.abort(ids)

    def inspect(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Returns the states of the queued and running requests among `request_ids`; one whose grammar is being
        compiled is neither."""
        return self._scheduler.inspect(request_ids)

    def step(self, on_scheduled: Callable[[list[str]], None] = lambda _: None) -> StepUpdate:
        """Schedule, run, update. A step that raises ends its own requests with an error, and no others. Before it runs,
        `on_scheduled` is called with the ids of the requests that run for the first time, if there are any."""
        started_s = self._clock()
        self._admit_compiled()
        running_ids = self._scheduler.running_ids
        if running_ids or len(self._grammars):  # grammars are compiled, and those of running requests draft tokens
            self._mark(running_ids)
        batch = self._scheduler.schedule(started_s)
        if newly_scheduled := self._scheduler.newly_scheduled:
            on_scheduled(newly_scheduled)
        ran = self._run(batch) if batch else _StepResult(None, [])
        ended_s = self._clock()
        self._has_unreported_aborts = False
        stats = self._stats(ran, ended_s - started_s)
        self._tracer.record(ended_s, ran.batch, stats)
        return StepUpdate(ended_s, ran.updates, stats)

    def close(self) -> None:
        self._tracer.close()
        self._grammars.close()

    def _admit_compiled(self) -> None:
        for request in self._grammars.take_ready(0.0 if self._scheduler.has_unfinished else _MAX_WAIT_S):
            self._admit(request)

    def _run(self, batch: Batch) -> _StepResult:
        started_s = self._clock()
        self._mark(request.request_id for request in batch.requests)
        run = self._runner.prefill if batch.phase is Phase.PREFILL else self._runner.decode
        try:
            batch, drafting_s = self._with_drafts(batch)
            batch = self._with_masks(batch)
            predicted_s = self._costs.predict(batch)
            output = run(batch)
        except Exception as error:
            logger.exception("a %s step of %d requests failed", batch.phase, len(batch.requests))
            return _StepResult(batch, self._scheduler.fail(batch, f"The engine failed on this request: {error}"))
        model_s = self._clock() - started_s - drafting_s
        self._costs.observe(batch, model_s)
        self._speculation.on_step(batch.num_drafts)
        return _StepResult(batch, self._scheduler.update(batch, output), model_s, predicted_s, drafting_s)

    def _with_drafts(self, batch: Batch) -> tuple[Batch, float]:
        """Returns the batch with the draft tokens that it wants of the draft model, and the seconds that these took."""
        if not batch.wants_drafts:
            return batch, 0.0
        started_s = self._clock()
        batch = self._runner.draft(batch)
        drafting_s = self._clock() - started_s
        self._costs.observe_drafting(batch, drafting_s)
        return batch, drafting_s

    def _mark(self, request_ids: Iterable[str]) -> None:
        self._marker.mark([*request_ids, *self._grammars.request_ids])

    def _with_masks(self, batch: Batch) -> Batch:
        """Returns the batch with the masks of requests that follow a grammar, and without the draft tokens that these
        forbid. Clients' grammars run only while the step is marked."""
        return replace(batch, requests=tuple(map(self._with_mask, batch.requests)))

    def _with_mask(self, scheduled: ScheduledRequest) -> ScheduledRequest:
        constraint = self._scheduler.constraint_of(scheduled.request_id)
        if constraint is None or not scheduled.samples:
            return scheduled
        allowed = constraint.allowed_tokens(scheduled.output_token_ids, scheduled.draft)
        return replace(shortened(scheduled, len(allowed) - 1), allowed_tokens=allowed)

    def _stats(self, ran: _StepResult, duration_s: float) -> StepStats:
        scheduler, batch = self._scheduler, ran.batch
        floor = self._floors.floor_of(batch) if batch and ran.model_s else None
        return StepStats(
            phase=batch.phase if batch else None,
            num_requests=len(batch.requests) if batch else 0,
            num_tokens=batch.num_tokens if batch else 0,
            duration_s=duration_s,
            model_s=ran.model_s,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._grammars),
            pool=self._pool.stats,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            predicted_s=ran.predicted_s,
            floor_s=floor.seconds if floor else None,
            bound=floor.bound if floor else None,
            num_drafts=self._speculation.num_drafts,
            num_accepted_drafts=self._speculation.num_accepted,
            drafting_s=ran.drafting_s,
        )


def _new_planner(costs: StepCosts, config: EngineConfig, info: EngineInfo) -> SpeculationPlanner:
    limits = config.num_speculative_tokens, config.target_itl_ms / 1000
    return SpeculationPlanner(costs, *limits, None if info.draft_size is None else FastestDraftLength(costs, *limits))
