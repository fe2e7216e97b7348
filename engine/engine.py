"""The engine: schedule, run, update. Synchronous, token ids only; usable in-process or behind `engine.process`.

`engine.assembly` makes one from settings.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

from engine.core.adapters import AdapterInfo, Adapters
from engine.core.batch import Batch, Phase, ScheduledRequest, StepOutput
from engine.core.cache_steering import CachedPrefixes
from engine.core.config import EngineInfo
from engine.core.crash_marker import Marker, NullMarker
from engine.core.draft import Drafter
from engine.core.errors import DeviceFailedError, InvalidParameterError
from engine.core.generation_request import GenerationRequest
from engine.core.messages import (
    AddRequest,
    ComputedSpan,
    FindPrefix,
    PrefixFound,
    RequestState,
    RequestUpdate,
    StepUpdate,
)
from engine.core.request import LoadedAdapter, Request
from engine.core.request_validation import check_request
from engine.core.sampling_params import SamplingParams
from engine.grammar.compiler import Grammars
from engine.kv_store.interface import KVStore
from engine.scheduling.cost.step_accounting import StepAccounting, StepCounts, StepTimes
from engine.scheduling.hand_overs import HandOvers
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation.draft_verification import shortened

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 0.005  # for a grammar or a block, when there is nothing else to do: messages wait as long


class Runner(Protocol):
    """Computes a batch: the model, or a fake of it."""

    def prefill(self, batch: Batch) -> StepOutput: ...

    def decode(self, batch: Batch) -> StepOutput: ...

    def draft(self, batch: Batch) -> Batch:
        """Returns the batch with the draft tokens that its requests want of the draft model; called only if there is
        one."""


class _StepResult(NamedTuple):
    """What a step ran, and what came of it."""

    batch: Batch | None = None
    updates: list[RequestUpdate] = []  # noqa: RUF012 - never changed
    times: StepTimes = StepTimes()
    experts_read: float | None = None


class Engine:
    """Runs requests to their end, one step at a time. Not thread-safe: one owner calls every method."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        grammars: Grammars,
        accounting: StepAccounting,
        *,
        store: KVStore,
        adapters: Adapters,
        new_drafter: Callable[[Request], Drafter] | None,
        marker: Marker | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`new_drafter` makes the drafter of each request; None where nothing is to be drafted. `on_close` ends what
        the runner needs."""
        self.info = info
        self._scheduler = scheduler
        self._hand_overs = HandOvers(scheduler.kv)
        self._runner = runner
        self._grammars = grammars
        self._accounting = accounting
        self._store = store
        self._adapters = adapters
        self._new_drafter = new_drafter
        self._marker = marker or NullMarker()
        self._clock = clock
        self._on_close = on_close
        self._has_unreported_aborts = False
        self._num_aborts = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        is_busy = self._scheduler.has_unfinished or self._scheduler.kv.has_transfers or bool(self._adapters.unloaded)
        return is_busy or self._has_unreported_aborts or len(self._grammars) > 0

    def add_request(self, message: AddRequest) -> None:
        """Queue a request. Raises RequestError, and changes nothing, if it can never run."""
        asked = message.asked
        check_request(self.info, asked.prompt_token_ids, asked.params)
        if not asked.weight > 0:
            raise InvalidParameterError("weight", f"weight must be above 0, got {asked.weight}.")
        if self._scheduler.has(message.request_id) or message.request_id in self._grammars:
            raise InvalidParameterError("request_id", f"request_id {message.request_id!r} is in use.")
        request = Request(
            message.request_id,
            asked,
            self._adapter(asked.adapter),
            num_announced_tokens=message.num_announced_tokens,
            output_token_ids=list(message.output_token_ids),  # it grows
            is_announced=len(message.output_token_ids) > len(asked.given_token_ids),
            is_stalled=message.is_stalled,
        )
        self._hand_overs.add(request)
        if asked.params.grammar is None:
            self._queue(request)
        else:
            self._grammars.add(request)

    def _adapter(self, digest: str) -> LoadedAdapter | None:
        if not digest:
            return None
        number = self._adapters.number_of(digest)
        if number is None:
            raise InvalidParameterError("model", "The adapter that the request asks for is no longer loaded.")
        return LoadedAdapter(digest, number)

    def load_adapter(self, path: str) -> AdapterInfo:
        """Loads an adapter over the model. Raises AdapterError."""
        return self._adapters.load(path)

    def unload_adapter(self, digest: str) -> None:
        """Takes no more requests for the adapter. It is freed when those that it has have ended."""
        self._adapters.unload(digest)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without further updates; unknown ids are ignored. The next step reports that they ended."""
        ids = list(request_ids)
        self._grammars.abort(ids)
        self._scheduler.abort(ids)
        self._hand_overs.abort(ids)
        self._num_aborts += len(ids)
        self._has_unreported_aborts = True

    def set_stalled(self, request_id: str, is_stalled: bool) -> None:
        """Notes whether the request's reader has stopped reading. One that has makes room for all others."""
        self._scheduler.set_stalled(request_id, is_stalled)

    def reset_prefix_cache(self, clears_store: bool) -> None:
        """Forgets the prefixes of all that was computed so far, in the KV store, too, if `clears_store`. Requests that
        run go on."""
        self._scheduler.kv.reset()
        if clears_store:
            self._store.clear()

    def drop_prefixes(self, tenant: str, key: str | None) -> None:
        """Forgets, also in the KV store, what is cached under this key of the tenant and no other, or under all its
        keys if that is None. Requests that run go on."""
        self._store.remove(self._scheduler.kv.drop_prefixes(tenant, key))

    def cached_prefixes(self, tenant: str) -> list[CachedPrefixes]:
        """Returns what is cached of the tenant's ended requests, by key."""
        return self._scheduler.kv.cached_prefixes(tenant, self._clock())

    def find_prefix(self, message: FindPrefix) -> PrefixFound:
        """Returns how much of a prompt need not be computed."""
        adapter = LoadedAdapter(message.adapter, 0) if message.adapter else None
        sampling = SamplingParams(max_tokens=0)
        asked = GenerationRequest(
            prompt_token_ids=message.token_ids,
            params=sampling,
            arrival_s=0.0,
            cache_salt=message.cache_salt,
        )
        request = Request("", asked, adapter)
        return PrefixFound(message.number, *self._scheduler.kv.found(request))

    def inspect(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Returns the states of the queued and running requests among `request_ids`; one whose grammar is being
        compiled is neither."""
        return self._scheduler.inspect(request_ids)

    def step(self, on_scheduled: Callable[[list[str]], None] = lambda _: None) -> StepUpdate:
        """Schedule, run, update. A step that raises ends its own requests with an error, and no others; raises
        DeviceFailedError where no later step can run. Before it runs, `on_scheduled` is called with the ids of the
        requests that run for the first time, if there are any."""
        started_s = self._clock()
        self._queue_compiled()
        self._release_adapters()
        running_ids = self._scheduler.running_ids
        if running_ids or len(self._grammars):  # grammars are compiled, and those of running requests draft tokens
            self._mark(running_ids)
        batch = self._schedule(started_s)
        if newly_scheduled := self._scheduler.newly_scheduled:
            on_scheduled(newly_scheduled)
        result = self._run(batch) if batch else _StepResult()
        ended_s = self._clock()
        self._has_unreported_aborts = False
        updates = self._hand_overs.settle(result.updates)
        scheduler = self._scheduler.stats
        scheduler = scheduler._replace(num_waiting=scheduler.num_waiting + len(self._grammars))
        num_generated = sum(len(update.token_ids) for update in updates)
        counts = StepCounts(
            num_generated, len(self._grammars), self._num_aborts, result.experts_read, self._store.stats
        )
        stats = self._accounting.record(result.batch, result.times, counts, scheduler, ended_s, ended_s - started_s)
        return StepUpdate(ended_s, updates, stats, _computed(result.batch))

    def rest(self, is_wanted: Callable[[], bool]) -> None:
        """To be called once a second while there is nothing to do. Returns soon when `is_wanted` returns True."""
        self._accounting.rest(is_wanted)

    def close(self) -> None:
        """Closes the trace and the KV store, and ends the compilation of grammars and other ranks of the model."""
        self._accounting.close()
        self._grammars.close()
        self._store.close()
        self._on_close()

    def _schedule(self, now_s: float) -> Batch | None:
        """Returns the next batch that runs, after its transfers began. Where none does, waits a moment for transfers
        under way."""
        self._scheduler.kv.end_transfers(self._store.take_ended())
        batch = self._scheduler.schedule(now_s)
        if batch:
            self._store.start(batch.transfers)
        if batch and batch.requests:
            return batch
        if self._scheduler.kv.has_transfers:
            self._store.wait(_MAX_WAIT_S)
        return None

    def _release_adapters(self) -> None:
        """Frees unloaded adapters that no request uses, queued, running, or with a grammar that is being compiled."""
        for number in self._adapters.unloaded if not len(self._grammars) else ():
            if not self._scheduler.uses_adapter(number):
                self._adapters.release(number)

    def _queue_compiled(self) -> None:
        for request in self._grammars.take_ready(0.0 if self._scheduler.has_unfinished else _MAX_WAIT_S):
            self._queue(request)

    def _queue(self, request: Request) -> None:
        """Queue a request with its drafter. One that another process of this engine began does not speculate: if a
        draft killed that process, it does not happen again."""
        was_begun = len(request.output_token_ids) > len(request.asked.given_token_ids)
        if self._new_drafter is not None and not was_begun:
            request.may_speculate, request.drafter = True, self._new_drafter(request)
        self._scheduler.add(request)

    def _run(self, batch: Batch) -> _StepResult:
        started_s = self._clock()
        self._mark(request.request_id for request in batch.requests)
        run = self._runner.prefill if batch.phase is Phase.PREFILL else self._runner.decode
        try:
            batch, drafting_s = self._with_drafts(batch)
            batch = self._with_masks(batch)
            predicted_s = self._accounting.predict(batch)
            output = run(batch)
        except DeviceFailedError:
            raise  # another engine process takes over
        except Exception as error:
            logger.exception("a %s step of %d requests failed", batch.phase, len(batch.requests))
            return _StepResult(batch, self._scheduler.fail(batch, f"The engine failed on this request: {error}"))
        model_s = self._clock() - started_s - drafting_s
        self._accounting.observe(batch, model_s, output.experts_read)
        times = StepTimes(model_s, drafting_s, predicted_s)
        return _StepResult(batch, self._scheduler.update(batch, output), times, output.experts_read)

    def _with_drafts(self, batch: Batch) -> tuple[Batch, float]:
        """Returns the batch with the draft tokens that it wants of the draft model, and the seconds that these took."""
        if not batch.wants_drafts:
            return batch, 0.0
        started_s = self._clock()
        batch = self._runner.draft(batch)
        drafting_s = self._clock() - started_s
        self._accounting.observe_drafting(batch, drafting_s)
        return batch, drafting_s

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

    def _mark(self, request_ids: Iterable[str]) -> None:
        self._marker.mark([*request_ids, *self._grammars.request_ids])


def _computed(batch: Batch | None) -> list[ComputedSpan]:
    return [ComputedSpan(each.request_id, each.start, each.end) for each in batch.requests] if batch else []
