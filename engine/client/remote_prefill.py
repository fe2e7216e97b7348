"""Prompts that other servers compute: a request is held until one of them has stored its prompt's blocks, and then
given to the engine, which finds them. Whatever goes wrong, the engine computes what it does not find.

A prompt is asked for once, however many requests wait for it, and given up when the last of them ends.
"""

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.client.live_request import LiveRequest
from engine.client.observer import EngineObserver
from engine.client.prefill_servers import PrefillServers, Prefix
from engine.core.config import EngineInfo
from engine.core.errors import RemotePrefillError
from engine.core.generation_request import GenerationRequest
from engine.core.messages import FindPrefix, PrefixFound
from engine.process.supervisor import Supervisor

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


@dataclass(slots=True, eq=False)
class _Job:
    """A prefix that is being asked for."""

    key: tuple[str, str, bytes]
    task: asyncio.Task[None] | None = None
    asked_s: float | None = None
    """When a server was asked; None as long as it is not known that it is to be."""
    waiting: dict[LiveRequest, float] = field(default_factory=dict)
    """The requests that wait for it, since when."""


class RemotePrefills:
    """The requests that are held, and what they wait for. All methods are for the event loop's thread."""

    def __init__(
        self,
        servers: PrefillServers,
        supervisor: Supervisor,
        observer: EngineObserver,
        on_release: Callable[[LiveRequest], None],
    ) -> None:
        """`on_release` is called with each request that need not be held any longer."""
        self._servers = servers
        self._supervisor = supervisor
        self._observer = observer
        self._on_release = on_release
        self._jobs: dict[tuple[str, str, bytes], _Job] = {}
        self._questions: dict[int, asyncio.Future[PrefixFound]] = {}
        self._numbers = itertools.count()
        self._log_again_s = 0.0

    def hold(self, live: LiveRequest, info: EngineInfo) -> None:
        """Hold a request that was admitted if it is worth it."""
        request = live.request
        num_tokens = len(request.prompt_token_ids) + len(request.given_token_ids)
        if num_tokens < self._servers.min_tokens or not info.kv_fingerprint:
            return
        token_ids = _prefix_of(request, info.prefix_step)
        if len(token_ids) < max(self._servers.min_tokens, 2):
            return
        if request.params.prompt_logprobs is not None or request.steering.stays_in_memory:
            return  # one wants more of its prompt than its blocks, the other none of them in files
        key = (request.cache_salt, request.adapter, array("q", token_ids).tobytes())
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(key)
            job.task = asyncio.create_task(self._run(job, request, token_ids, info.kv_fingerprint))
        job.waiting[live] = time.monotonic()
        live.is_held = True
        live.timeouts.on_scheduled()  # how long it may wait there is that server's matter

    def end(self, live: LiveRequest) -> None:
        """Gives up the prefill that an ended request waited for, unless others wait for it, too. Idempotent."""
        job = next((job for job in self._jobs.values() if live in job.waiting), None) if live.is_held else None
        if job is None:
            return
        del job.waiting[live]
        if not job.waiting and job.task is not None:
            del self._jobs[job.key]
            job.task.cancel()

    def check_found(self, live: LiveRequest, num_cached_tokens: int) -> None:
        """Report what another server stored for a request and the engine did not find. Call with its first output."""
        num_lost, live.num_announced_tokens = live.num_announced_tokens - num_cached_tokens, 0
        if num_lost <= 0:
            return
        self._observer.on_lost_tokens(num_lost)
        text = "%d tokens whose blocks another server stored were not found: is its --kv-store the same directory?"
        self._log(text, num_lost)

    def on_answer(self, found: PrefixFound) -> None:
        answer = self._questions.pop(found.number, None)
        if answer is not None and not answer.done():
            answer.set_result(found)

    def engine_is_down(self) -> None:
        """Answer all questions: what the next engine finds is seen when it has the requests."""
        for number in list(self._questions):
            self.on_answer(PrefixFound(number))

    async def _run(self, job: _Job, request: GenerationRequest, token_ids: list[int], kv_fingerprint: str) -> None:
        num_stored = 0
        try:
            found = await self._find(request, token_ids)
            if len(token_ids) - found.num_cached_tokens >= self._servers.min_tokens:
                job.asked_s = time.monotonic()
                num_stored = await self._compute(Prefix(request, token_ids, found.num_stored_tokens, kv_fingerprint))
        except Exception:
            logger.exception("asking for a prompt failed; the engine computes it")
        del self._jobs[job.key]
        now_s = time.monotonic()
        for live, since_s in job.waiting.items():
            live.resume_with(num_stored, None if job.asked_s is None else now_s - max(job.asked_s, since_s))
            live.timeouts.on_unscheduled()
            self._on_release(live)

    async def _compute(self, prefix: Prefix) -> int:
        started_s = time.monotonic()
        try:
            num_stored = await self._servers.compute(prefix)
        except RemotePrefillError as error:
            self._observer.on_remote_prefill(time.monotonic() - started_s, None)
            self._log("%s The engine computes the prompt.", error)
            return 0
        self._observer.on_remote_prefill(time.monotonic() - started_s, num_stored)
        return num_stored

    async def _find(self, request: GenerationRequest, token_ids: list[int]) -> PrefixFound:
        """Returns what the engine has of the prefix: nothing while none is up."""
        number = next(self._numbers)
        if not self._supervisor.is_up:
            return PrefixFound(number)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._supervisor.send(FindPrefix(number, token_ids, request.cache_salt, request.adapter))
            found: PrefixFound = await answer
            return found
        finally:
            self._questions.pop(number, None)

    def _log(self, text: str, *args: object) -> None:
        """Warns of what may happen with every prompt: once a minute."""
        now_s = time.monotonic()
        if now_s >= self._log_again_s:
            self._log_again_s = now_s + _LOG_EVERY_S
            logger.warning(text, *args)


def _prefix_of(request: GenerationRequest, step: int) -> list[int]:
    """Returns the tokens that the engine could find for a request, a multiple of `step`, and the next token: an engine
    computes at least one."""
    num_tokens = len(request.prompt_token_ids) + len(request.given_token_ids)
    end = (num_tokens - 1) // step * step + 1
    return [*request.prompt_token_ids[:end], *request.given_token_ids][:end]
