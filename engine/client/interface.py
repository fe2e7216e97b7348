"""The engine client: the asyncio interface to an engine that the server uses.

`AsyncEngine` implements it over the engine process; tests implement it in-process.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from engine.core.adapters import AdapterInfo
from engine.core.cache_steering import CachedPrefixes
from engine.core.config import EngineInfo
from engine.core.generation_request import GenerationRequest, Tenant
from engine.core.outputs import RequestOutput
from engine.core.request_snapshot import RequestSnapshot
from engine.core.stats import QueueStats, StepStats


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

    async def inspect(self, tenant: str, client_request_id: str | None, limit: int) -> list[RequestSnapshot]:
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

    def abort(self, tenant: str, client_request_id: str) -> bool:
        """End all of the tenant's live requests of this group at once; False if there are none. `generate` yields, as
        for one at its deadline, a last output with the tokens received so far, finished by LENGTH and the stop reason
        "abort"; it raises RequestAbortedError for a request that has none.
        """
