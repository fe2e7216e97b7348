"""The engine client: the asyncio interface to an engine that the server uses, and the values that cross it.

`AsyncEngine` implements it over the engine process; tests implement it in-process.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.adapters import AdapterInfo
from engine.core.cache_steering import CachedPrefixes, CacheSteering
from engine.core.config import EngineInfo
from engine.core.outputs import RequestOutput
from engine.core.request_snapshot import RequestSnapshot
from engine.core.sampling_params import SamplingParams
from engine.core.stats import QueueStats, StepStats

_PATIENCE_S = 60.0  # as long as a request may wait unless an operator says otherwise


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as admission control counts it."""

    name: str = ""
    share: float = 1.0
    """Its share of the places and tokens that admission control keeps for tenants; all shares add up to 1."""


SOLE_TENANT = Tenant()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    """When the server received the request, on `time.monotonic()`."""
    group_id: str = ""
    """Id of the request that this sequence is a part of, as the client knows it. Clients choose such ids: several
    requests may have the same."""
    is_sibling: bool = False
    """Whether a sequence of the same request was admitted just before. Then this one is neither refused for a long wait
    nor ended by it: the request as such did not wait too long."""
    repeats_prompt: bool = False
    """Whether this is a further answer to a prompt of the same request, whose tokens are counted once."""
    priority: int = 0
    """Its order among the tenant's own requests: lower runs first."""
    tenant: str = ""
    """Name of the tenant. Tenants share the engine by their tokens, in proportion to their weights."""
    weight: float = 1.0
    share: float = 1.0
    """The tenant's share in admission control: see `Tenant`."""
    cache_salt: str = ""
    adapter: str = ""
    """Digest of the adapter that it runs with; empty for the model as it is."""
    steering: CacheSteering = field(default_factory=CacheSteering)
    until_stored: bool = False
    """Whether its last output comes only when its full blocks are in the KV store, or cannot be."""
    num_announced_tokens: int = 0
    """Its first tokens of which another server says that it stored their blocks."""
    given_token_ids: tuple[int, ...] = ()
    """Tokens that the answer begins with, which another server generated for the same request."""
    max_queue_s: float | None = None
    """Longest wait to be scheduled: a request that would wait longer is refused, and one that does ends. The engine has
    a limit of its own."""
    ttft_limit_s: float | None = None
    """Longest time from its arrival to its first token with which it is worth its while: a request that would wait
    longer to be scheduled is refused, but one that does goes on."""
    deadline_s: float | None = None
    """Seconds after its arrival when it ends, with the tokens it has, or with RequestTimeoutError if it has none."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that name its trace, for other servers that work for it."""

    @property
    def quota_tenant(self) -> Tenant:
        """The tenant whose quota the request counts against."""
        return Tenant(self.tenant, self.share)

    @property
    def due_s(self) -> float:
        """When its first token is wanted. Where the client asks for no time it is one all the same, so that those that
        ask do not keep it waiting for ever."""
        return self.arrival_s + (_PATIENCE_S if self.ttft_limit_s is None else self.ttft_limit_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return self._left_of(self.deadline_s)

    @property
    def patience_s(self) -> float | None:
        """The longest predicted wait with which admission makes sense; None if there is no limit."""
        limits = (self.max_queue_s, self.left_s, self._left_of(self.ttft_limit_s))
        return min((limit_s for limit_s in limits if limit_s is not None), default=None)

    def _left_of(self, limit_s: float | None) -> float | None:
        """Returns the seconds that are left of a time that began with the arrival."""
        return None if limit_s is None else max(self.arrival_s + limit_s - time.monotonic(), 0.0)


class AdapterClient(Protocol):
    """The adapters (LoRA) that are loaded, by the names that clients give."""

    @property
    def loaded(self) -> Mapping[str, AdapterInfo]:
        """The adapters that requests may name now."""

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter, also in the engines of later restarts. Raises AdapterError, and EngineUnavailableError if
        there is no engine that could. It goes on even if the caller leaves."""

    def unload(self, name: str) -> None:
        """Take no more requests for a loaded adapter. Those that it has go on."""


class EngineClient(Protocol):
    """What the server may ask of an engine. All methods are for the event loop's thread."""

    @property
    def is_ready(self) -> bool:
        """Whether an engine process is up to run requests. False while one loads the model, at the start or after a
        death, and once the engine is stopped or given up."""

    @property
    def info(self) -> EngineInfo:
        """What the engine reports of its model and machine. Raises EngineUnavailableError before it is ready."""

    @property
    def last_stats(self) -> StepStats | None:
        """The newest step's numbers; None before the first step."""

    async def settle(self, timeout_s: float) -> None:
        """Wait until the newest step's numbers know of all requests that ended, or for `timeout_s`: the engine learns
        between two steps that a request was aborted, or that a stop string ended it."""

    @property
    def num_live(self) -> int:
        """Number of requests between `generate` and their end."""

    @property
    def queue_stats(self) -> QueueStats:
        """How many requests are admitted, and how long a new one would wait."""

    def check_admission(self, tenant: Tenant) -> None:
        """Raise OverloadedError, or EngineRestartingError, if any request of the tenant would be refused now."""

    @property
    def adapters(self) -> AdapterClient:
        """The adapters over the model."""

    def check_health(self) -> None:
        """Raise EngineUnavailableError when the engine is not loaded, given up, or silent although it has work. One
        that is being restarted is healthy."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs, the last one finished. Closing the generator aborts the request at once.

        Raises before the first output: RequestError, OverloadedError, RequestTimeoutError, RequestAbortedError,
        EngineUnavailableError.
        Raises after it: RequestError when no token can come next, as its grammar or bans have it; EngineFailedError, or
        EngineUnavailableError when the engine was stopped. An engine that dies is no error as long as it can be
        restarted: the outputs go on where they stopped.
        """

    async def inspect(self, tenant: str, group_id: str | None, limit: int) -> list[RequestSnapshot]:
        """Returns snapshots of the tenant's live requests, of one group or of all, in order of arrival and at most
        `limit`. Asks the engine process, and waits for it a few seconds at most."""

    def reset_prefix_cache(self, clears_store: bool) -> None:
        """Forget the prefixes of all that was computed so far, in the KV store, too, if `clears_store`. Requests that
        run go on; those sent from now on find nothing of it. Call only while `is_ready`."""

    async def cached_prefixes(self, tenant: str) -> list[CachedPrefixes]:
        """Returns what is cached of the tenant's ended requests, by cache key. Asks the engine process, and raises
        EngineUnavailableError if that does not answer within a few seconds."""

    def drop_prefixes(self, tenant: str, key: str | None) -> None:
        """Forget, also in the KV store, what is cached under this key of the tenant and no other; under all its keys if
        that is None. Requests that run go on. Call only while `is_ready`."""

    def abort(self, tenant: str, group_id: str) -> bool:
        """End all of the tenant's live requests of this group at once; False if there are none. `generate` yields, as
        for one at its deadline, a last output with the tokens received so far, finished by LENGTH and the stop reason
        "abort"; it raises RequestAbortedError for a request that has none.
        """
