"""The typed messages between the server process and the engine process, as msgpack over a local socket.

To the engine:    Start (once, first), AddRequest, AbortRequests, InspectRequests, Shutdown
From the engine:  EngineReady, RequestsScheduled (before a step), StepUpdate (one per step), Heartbeat (once a second
                  when idle), RequestRefused, RequestStates (one per InspectRequests), EngineFailure (last)
"""

import msgspec

from engine.core.batch import TokenLogprobs
from engine.core.config import EngineConfig, EngineInfo
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.core.stats import StepStats


class Start(msgspec.Struct, frozen=True, tag=True):
    config: EngineConfig
    log_level: int


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    output_token_ids: list[int] = []
    """Tokens generated before an engine restart; generation goes on after them."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class InspectRequests(msgspec.Struct, frozen=True, tag=True):
    """Asks for RequestStates."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class FirstTokenInfo(msgspec.Struct, frozen=True):
    """Sent once per request, with its first token (or its end, if it has none)."""

    first_scheduled_s: float | None
    num_cached_tokens: int
    num_prefill_chunks: int
    prompt_logprobs: list[bytes] | None = None
    """Scores of prompt tokens 1, 2, ... when asked for, as `engine.core.prompt_logprobs` packs them."""


class RequestUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's news from one step."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    first: FirstTokenInfo | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, when it was not EOS."""
    num_preemptions: int = 0
    embedding: bytes = b""
    error: str | None = None
    blames_request: bool = False
    """Whether the error is the request's own fault."""


class RequestsScheduled(msgspec.Struct, frozen=True, tag=True):
    """These run for the first time, in the step that begins now: it may take long."""

    request_ids: list[str]


class StepUpdate(msgspec.Struct, frozen=True, tag=True):
    """Everything one step made, for all requests; `time_s` is when its tokens came to exist."""

    time_s: float
    updates: list[RequestUpdate]
    stats: StepStats


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
    """How far one request is, between two steps. The defaults are those of one that no engine has."""

    request_id: str
    was_scheduled: bool = False
    """Whether it ran already. It may wait again: for blocks."""
    num_before: int | None = None
    """Its tenant's requests that wait and come before it; None if it is not in the queue."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_blocks: int = 0
    """Held by it, with those that it shares."""


class RequestStates(msgspec.Struct, frozen=True, tag=True):
    """Of those that were asked for and are here."""

    states: list[RequestState]


class EngineFailure(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; `kind` is the error class's name, `message` one sentence for the user."""

    kind: str
    message: str
    detail: str = ""


ToEngine = Start | AddRequest | AbortRequests | InspectRequests | Shutdown
FromEngine = EngineReady | RequestsScheduled | StepUpdate | Heartbeat | RequestRefused | RequestStates | EngineFailure
