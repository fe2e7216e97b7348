"""The typed messages between the server process and the engine process, as msgpack over a local socket.

To the engine:    Start (once, first), AddRequest, AbortRequests, MarkStalled, Inspect, FindPrefix, ResetPrefixCache,
                  DropPrefixes, LoadAdapter, UnloadAdapter, Shutdown
From the engine:  EngineReady, RequestsScheduled (before a step), StepUpdate (one per step), Heartbeat (once a second
                  when idle), RequestRefused, Inspection (one per Inspect), PrefixFound (one per FindPrefix),
                  AdapterLoaded (one per LoadAdapter), EngineFailure (last)
"""

import msgspec

from engine.core.adapters import AdapterInfo
from engine.core.batch import TokenLogprobs
from engine.core.cache_steering import CachedPrefixes
from engine.core.config import EngineConfig, EngineInfo
from engine.core.generation_request import GenerationRequest
from engine.core.request import FinishReason
from engine.core.stats import StepStats


class Start(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine process to load the model."""

    config: EngineConfig
    log_level: int


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Gives the engine a request, or what another engine process began of it."""

    request_id: str
    asked: GenerationRequest
    num_announced_tokens: int = 0
    """Its first tokens of which another server says that it stored their blocks."""
    output_token_ids: list[int] = []
    """Tokens generated before an engine restart, or that the request begins with; generation goes on after them."""
    is_stalled: bool = False
    """Whether its reader has stopped reading: see `MarkStalled`."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class MarkStalled(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine that a request's reader has stopped reading, or that it has caught up."""

    request_id: str
    is_stalled: bool


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks the engine for an `Inspection`."""

    request_ids: list[str]
    """Requests whose states it is to have."""
    tenants: list[str] = []
    """Tenants of which it is to have what is cached."""


class FindPrefix(msgspec.Struct, frozen=True, tag=True):
    """Asks the engine for a `PrefixFound`: how much of a prompt need not be computed."""

    number: int
    """Number of the question, for its answer."""
    token_ids: list[int]
    cache_salt: str
    adapter: str
    """Digest of the adapter; empty for the model as it is."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine to forget the prefixes of all that was computed so far."""

    clears_store: bool
    """Whether the KV store forgets them, too."""


class DropPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine to forget, also in the KV store, what is cached under this key of the tenant and no other."""

    tenant: str
    key: str | None
    """None for all of the tenant's keys."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Asks the engine for an `AdapterLoaded`."""

    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Tells the engine to take no more requests for the adapter of this digest. Those that it has go on."""

    digest: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class FirstTokenInfo(msgspec.Struct, frozen=True, gc=False):
    """Facts about a request's prefill, sent once per request, with its first token (or its end, if it has none)."""

    first_scheduled_s: float | None
    num_cached_tokens: int
    num_prefill_chunks: int
    prompt_logprobs: list[bytes] | None = None
    """Log-probabilities of prompt tokens 1, 2, ..., if requested, as `engine.core.prompt_logprobs` packs them."""


class RequestUpdate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one step generated for one request, and how the request ended if it did. It may wait for a reader for long,
    as `TokenLogprobs` may: tuples, unlike lists, are soon left alone by the garbage collector, too."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    first: FirstTokenInfo | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, when it was not EOS."""
    num_preemptions: int = 0
    embedding: bytes = b""
    num_stored_tokens: int = 0
    """First tokens whose blocks are in the KV store, of a request whose last update waited for that."""
    error: str | None = None
    blames_request: bool = False
    """Whether the error is the request's own fault."""


class RequestsScheduled(msgspec.Struct, frozen=True, tag=True):
    """Announces the requests that run for the first time in the step that begins now, which may take long."""

    request_ids: list[str]


class ComputedSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The positions [start, end) of one request that a step computed."""

    request_id: str
    start: int
    end: int


class StepUpdate(msgspec.Struct, frozen=True, tag=True):
    """Output of one step for all requests; `time_s` is when its tokens had been sampled."""

    time_s: float
    updates: list[RequestUpdate]
    stats: StepStats
    computed: list[ComputedSpan] = []
    """What it computed of each request that ran in it."""


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    time_s: float


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The request never ran because it never can; `param` names the request field at fault, if one is."""

    request_id: str
    message: str
    param: str | None = None


class RequestState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of one request between two steps. The defaults describe a request that no engine has."""

    request_id: str
    was_scheduled: bool = False
    """Whether the request has run already. It may be waiting again, preempted for blocks."""
    num_before: int | None = None
    """Number of waiting requests of its tenant that come before it; None if it is not in the queue."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_blocks: int = 0
    """Blocks that it holds, shared ones included."""


class Inspection(msgspec.Struct, frozen=True, tag=True):
    """What an `Inspect` asked for."""

    states: list[RequestState]
    """Without those of requests that the engine does not have."""
    cached: dict[str, list[CachedPrefixes]] = {}
    """By tenant."""


class PrefixFound(msgspec.Struct, frozen=True, tag=True):
    """What is cached of the beginning of a prompt, of which one token at least is not."""

    number: int
    num_cached_tokens: int = 0
    """Tokens whose blocks are in memory or in the KV store."""
    num_stored_tokens: int = 0
    """Tokens whose blocks are in the KV store."""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """What came of a `LoadAdapter`: the adapter, or why it cannot be loaded."""

    path: str
    info: AdapterInfo | None = None
    error: str = ""


class EngineFailure(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; `kind` is the error class's name, `message` one sentence for the user."""

    kind: str
    message: str
    detail: str = ""


ToEngine = (
    Start
    | AddRequest
    | AbortRequests
    | MarkStalled
    | Inspect
    | FindPrefix
    | ResetPrefixCache
    | DropPrefixes
    | LoadAdapter
    | UnloadAdapter
    | Shutdown
)
FromEngine = (
    EngineReady
    | RequestsScheduled
    | StepUpdate
    | Heartbeat
    | RequestRefused
    | Inspection
    | PrefixFound
    | AdapterLoaded
    | EngineFailure
)
