"""Response models of GET and DELETE /v1/requests."""

from typing import Literal

from pydantic import BaseModel


class LiveSequence(BaseModel):
    """An unfinished sequence. What only the engine knows is null if it does not report within two seconds."""

    phase: Literal["queue", "prefill", "decode"] | None
    """queue until first scheduled, prefill until the first token, decode after it."""
    queue_position: int | None
    """Position among its API key's waiting requests, from 1; null while it runs. If preempted, it waits again."""
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache."""
    computed_tokens: int | None
    """Tokens of prompt and answer whose KV is computed."""
    generated_tokens: int
    kv_blocks: int | None
    """KV blocks held, shared ones included."""
    queue_ms: float | None
    """Time from arrival until first scheduled; null before the first token."""
    ttft_ms: float | None
    """Time to first token; null before it."""
    predicted_end_ms: float | None
    """Time until it ends, if it goes on to `max_tokens` at its pace so far; null before its second token."""


class LiveRequest(BaseModel):
    id: str
    """The request's `X-Request-Id`."""
    object: Literal["request"]
    age_ms: float
    """Time since the request arrived."""
    sequences: list[LiveSequence]
    """The request's unfinished sequences, one per prompt and choice."""


class LiveRequestList(BaseModel):
    object: Literal["list"]
    data: list[LiveRequest]
    has_more: bool
    """Whether there are more sequences than are listed."""


class RequestDeletion(BaseModel):
    id: str
    object: Literal["request"] = "request"
    deleted: Literal[True] = True
