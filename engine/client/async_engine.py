"""The engine client over an engine process. Text, stop strings, admission and timings are made here, on the event loop;
scheduling and the model run in the other process.
"""

import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import TypeVar

from engine.client.aborts import Aborts
from engine.client.adapter_registry import AdapterRegistry
from engine.client.admission import AdmissionControl, AdmissionLimits
from engine.client.live_request import LiveRequest, timed_update
from engine.client.observer import EngineObserver, GuardedObserver, NullObserver, observe_output
from engine.client.prefill_servers import NO_SERVERS, PrefillServers
from engine.client.remote_prefill import RemotePrefills
from engine.client.request_inspector import RequestInspector
from engine.client.request_registry import RequestRegistry
from engine.client.request_timeouts import RequestTimeouts
from engine.core.cache_steering import CachedPrefixes
from engine.core.config import EngineConfig, EngineInfo
from engine.core.errors import (
    EngineFailedError,
    EngineGivenUpError,
    EngineRestartingError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    TwostepError,
)
from engine.core.generation_request import GenerationRequest, Tenant
from engine.core.messages import (
    AdapterLoaded,
    DropPrefixes,
    FromEngine,
    Inspection,
    PrefixFound,
    RequestRefused,
    RequestsScheduled,
    ResetPrefixCache,
    StepUpdate,
)
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from engine.core.request_snapshot import RequestSnapshot
from engine.core.request_validation import check_given, check_request
from engine.core.stats import QueueStats, StepStats, stats_without_engine
from engine.host.python_module import module_command
from engine.process.first_process import FirstProcess
from engine.process.poison_requests import Death
from engine.process.restart_policy import RestartPolicy
from engine.process.supervisor import Supervisor
from engine.process.watchdog import Watchdog
from engine.text.detokenizer import TokenTable

logger = logging.getLogger(__name__)

_STOPPED = "The engine was stopped: the server is shutting down."

T = TypeVar("T")

ENGINE_COMMAND = module_command("engine.process")


class AsyncEngine:
    """Implements `EngineClient` over one engine process at a time. All methods are for the event loop's thread.

    When the process dies, another one is started and given every live request, with the tokens received so far.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: AdmissionLimits | None = None,
        observer: EngineObserver | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        max_silence_s: float = 120.0,
        max_restarts: int = 5,
        keeps_spare: bool = False,
        first: FirstProcess | None = None,
        prefill_servers: PrefillServers = NO_SERVERS,
    ) -> None:
        """`command` starts the engine process: see `EngineProcess`. An engine that has work and sends nothing for
        `max_silence_s` counts as hung, and is killed. At most `max_restarts` in a row may be fruitless: see
        `RestartPolicy`. `keeps_spare` has another process waiting for a death. `first` was spawned before."""
        self._table: TokenTable  # from `start` on
        self._observer = GuardedObserver(observer or NullObserver())
        self._config, self._limits = config, limits or AdmissionLimits()
        self._admission = _admission(config, self._limits, "cpu")  # of nobody yet
        self._numbers = itertools.count()
        self._info: EngineInfo | None = None
        self._last_stats: StepStats | None = None
        self._failure: TwostepError | None = None
        self._watchdog = Watchdog(
            max_silence_s, lambda: self._supervisor.is_up and self._registry.has_work, self._on_hang
        )
        self._supervisor = Supervisor(config, command, RestartPolicy(max_restarts), self, keeps_spare, first)
        self._registry = RequestRegistry(self._supervisor.send, self._watchdog.begin)
        self._remote = RemotePrefills(prefill_servers, self._supervisor, self._observer, self._registry.release)
        self._aborts = Aborts(self._supervisor.send)
        self._inspector, self.adapters = RequestInspector(self._supervisor), AdapterRegistry(self._supervisor)
        self._has_answered = False  # whether the current engine process has, or the last one while none is up

    async def spawn(self) -> None:
        """Have the process, unless it was spawned, import its libraries while `start` is prepared. Raises OSError."""
        await self._supervisor.spawn()

    async def start(self, table: TokenTable) -> EngineInfo:
        """Start the process, which is spawned unless it was, and wait until the model is loaded, once. `table` tells
        the texts of its tokens.

        Raises ConfigError or ModelError as the process reports them, EngineUnavailableError if it dies.
        """
        self._table = table
        try:
            self._info = await self._supervisor.start()
        except BaseException as error:
            self._fail(error if isinstance(error, TwostepError) else EngineUnavailableError(_STOPPED))
            await self.stop()
            raise
        self._admission = _admission(self._config, self._limits, self._info.device)
        self.adapters.engine_has_started()
        self._registry.engine_is_up()
        return self._info

    async def stop(self) -> None:
        """End the process, whatever it does, and the live requests with it. Idempotent."""
        self._fail(EngineUnavailableError(_STOPPED))
        await self._supervisor.stop(EngineUnavailableError(_STOPPED))

    @property
    def is_ready(self) -> bool:
        return self._supervisor.is_up and self._failure is None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise _unavailable_after(self._failure)
        return self._info

    @property
    def last_stats(self) -> StepStats | None:
        return self._last_stats

    async def settle(self, timeout_s: float) -> None:
        if self.is_ready:
            await self._aborts.settle(timeout_s)

    @property
    def num_live(self) -> int:
        return len(self._registry)

    @property
    def queue_stats(self) -> QueueStats:
        return self._admission.stats

    def check_admission(self, tenant: Tenant) -> None:
        _ask(lambda: self._admission.check(tenant=tenant), self._supervisor)

    def check_health(self) -> None:
        if self._failure is not None or self._info is None:
            raise _unavailable_after(self._failure)
        if self._watchdog.is_silent:
            raise EngineUnavailableError(self._watchdog.complaint)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        live = self._admit(request)
        reason = FinishReason.ABORT  # stays so if the caller leaves
        try:
            while True:
                output = await live.next_output()
                self._remote.check_found(live, output.num_cached_tokens)
                observe_output(self._observer, request, output, live.last_gap_s)
                if output.finish_reason is not None:
                    reason = output.finish_reason
                    self._end(live, reason)
                yield output
                if output.finish_reason is not None:
                    return
        except TwostepError as error:
            if not isinstance(error, RequestTimeoutError):  # reaching the client's own limit counts as an abort
                reason = FinishReason.ERROR
            raise
        finally:
            self._end(live, reason)

    async def inspect(self, tenant: str, client_request_id: str | None, limit: int) -> list[RequestSnapshot]:
        return await self._inspector.snapshots(self._registry.group(tenant, client_request_id)[:limit])

    def reset_prefix_cache(self, clears_store: bool) -> None:
        self._supervisor.send(ResetPrefixCache(clears_store))

    async def cached_prefixes(self, tenant: str) -> list[CachedPrefixes]:
        return await self._inspector.cached_prefixes(tenant)

    def drop_prefixes(self, tenant: str, key: str | None) -> None:
        self._supervisor.send(DropPrefixes(tenant, key))

    def abort(self, tenant: str, client_request_id: str) -> bool:
        for live in (aborted := self._registry.group(tenant, client_request_id)):
            self._end(live, FinishReason.ABORT)  # at once, even if the caller never reads the last output
            live.abort()
        return bool(aborted)

    def _admit(self, request: GenerationRequest) -> LiveRequest:
        if self._failure is not None:
            raise _unavailable_after(self._failure)
        check_request(self.info, request.prompt_token_ids, request.params)
        check_given(self.info, request.given_token_ids, request.params)
        place = _ask(lambda: self._admission.admit(request), self._supervisor)
        engine_id = f"{request.client_request_id}/{next(self._numbers)}"
        live = LiveRequest(request, engine_id, self._table, place)
        live.timeouts = _timeouts(request, live, self._admission.queue_limit_s(request.max_queue_s), self._expire)
        self._remote.hold(live, self.info)
        self._registry.add(live)
        self._watchdog.watch()
        self._report_pause()
        return live

    def _expire(self, live: LiveRequest, end: Callable[[], None]) -> None:
        """End a request that reached one of its limits, at once, even if the caller never reads the last output."""
        self._abort(live)
        end()
        self._registry.advance_trials()

    def _end(self, live: LiveRequest, reason: FinishReason) -> None:
        """Free what a request holds here and in the engine, and report its end. Every request passes here, whatever
        ended it. Idempotent; never waits."""
        if not self._registry.remove(live):
            return
        live.timeouts.cancel()
        live.place.leave()
        self._abort(live)
        self._observer.on_finish(reason, live.timings)
        self._report_pause()

    def _abort(self, live: LiveRequest) -> None:
        """Abort the request in the engine process, unless it has ended there, or what it is held for. Idempotent."""
        self._remote.end(live)
        if live.is_known_to_engine:
            live.is_known_to_engine = False
            self._aborts.add(live.engine_id)

    # What the supervisor reports.

    def on_message(self, message: FromEngine) -> None:
        self._watchdog.reset()
        if isinstance(message, StepUpdate):
            self._on_step(message)
        elif isinstance(message, RequestsScheduled):
            self._registry.on_scheduled(message.request_ids)
        elif isinstance(message, RequestRefused):
            self._registry.put(message.request_id, RequestError(message.message, message.param))
        elif isinstance(message, Inspection):
            self._inspector.on_answer(message)
        elif isinstance(message, PrefixFound):
            self._remote.on_answer(message)
        elif isinstance(message, AdapterLoaded):
            self.adapters.on_answer(message)
        self._registry.advance_trials()

    def on_engine_down(self) -> bool:
        self._watchdog.stop()
        for part in (self._inspector, self._remote, self.adapters, self._registry):
            part.engine_is_down()
        self._report_pause()
        return self._has_answered or not self._registry

    def on_engine_starting(self) -> None:
        self._last_stats = None
        self._aborts.on_restart()
        self._observer.on_restart()
        self._report_pause()

    def on_engine_up(self, death: Death) -> None:
        self._has_answered = False  # what arrived since the death came from the dead process
        self.adapters.engine_is_up()
        self._admission.forget_stall()
        self._registry.on_unscheduled()
        if (guilty := self._registry.engine_is_up(death)) is not None:
            self._has_answered = True
            logger.error("request %s is refused: the engine died again and again computing it and nothing else", guilty)
        _log_restart(self._supervisor.down_s, self._registry)
        self._watchdog.reset()
        self._watchdog.watch()

    def on_engine_lost(self, error: EngineFailedError) -> None:
        self._fail(error)

    def _on_step(self, step: StepUpdate) -> None:
        """Hands the step's tokens on, and then reports its numbers."""
        self._has_answered |= bool(step.updates)
        for update in step.updates:
            self._registry.put(update.request_id, timed_update(update, step.time_s))
        if self._supervisor.is_up:  # the last statistics of a dead engine are outdated
            self._last_stats = step.stats
            self._observer.on_step(step.stats, self._registry.shares_of(step.computed))
            self._aborts.on_stats(step.stats.num_aborts)

    def _report_pause(self) -> None:
        """Report to the observer, while no engine process is up, that all requests wait and no block is held."""
        if self._supervisor.is_up or self._info is None:
            return
        self._last_stats = stats_without_engine(self._last_stats, len(self._registry), self._info.num_blocks)
        self._observer.on_step(self._last_stats)

    def _fail(self, error: TwostepError) -> None:
        """Fail all live requests; from now on the engine is not ready. The first failure stands."""
        if self._failure is not None:
            return
        self._failure = error
        self._watchdog.stop()
        for live in self._registry:
            live.put(EngineFailedError(str(error), error.detail) if isinstance(error, EngineFailedError) else error)

    def _on_hang(self) -> None:
        self._supervisor.kill(EngineFailedError(self._watchdog.complaint))


def _ask(ask: Callable[[], T], supervisor: Supervisor) -> T:
    """Returns the result of asking admission control. While no engine is up, its OverloadedError becomes an
    EngineRestartingError."""
    try:
        return ask()
    except OverloadedError as error:
        if supervisor.is_up:
            raise
        retry_after_s = max(error.retry_after_s, supervisor.up_in_s)
        raise EngineRestartingError(f"The engine is being restarted. {error}", retry_after_s) from error


def _timeouts(
    request: GenerationRequest,
    live: LiveRequest,
    limit_s: float,
    expire: Callable[[LiveRequest, Callable[[], None]], None],
) -> RequestTimeouts:
    """Returns the timers of a request that may wait for `limit_s`; `expire` ends it, given what tells its reader."""
    leave_queue = partial(live.leave_queue, limit_s)
    return RequestTimeouts(request, limit_s, partial(expire, live, leave_queue), partial(expire, live, live.expire))


def _log_restart(down_s: float, registry: RequestRegistry) -> None:
    num_begun, num_suspects = registry.num_begun, registry.num_suspects
    text = "up again after %.1f s; streams that go on: %d; waiting: %d; run alone first, in case they killed it: %d"
    logger.warning(text, down_s, num_begun, len(registry) - num_begun, num_suspects)


def _unavailable_after(failure: TwostepError | None) -> EngineUnavailableError:
    """Returns the error for requests after this failure; None stands for an engine that is not loaded yet."""
    if failure is None:
        return EngineUnavailableError("The engine is still loading the model.")
    is_over = isinstance(failure, EngineFailedError)
    return (EngineGivenUpError if is_over else EngineUnavailableError)(str(failure))


def _admission(config: EngineConfig, limits: AdmissionLimits, device: str) -> AdmissionControl:
    """Returns the admission control of an engine on this device."""
    step = config.limits_on(device)
    return AdmissionControl(limits, step.max_num_seqs, step.max_num_batched_tokens)
