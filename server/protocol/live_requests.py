"""GET /v1/requests, and its DELETE."""

from typing import Literal

from pydantic import BaseModel


class LiveSequence(BaseModel):
    """What only the engine knows is null if it does not tell within two seconds: a step may take longer."""

    phase: Literal["queue", "prefill", "decode"] | None
    """Until first scheduled, until the first token, after it."""
    queue_position: int | None
    """Among its API key's requests that wait, from 1; null while it runs. Who ran may wait again, for KV blocks."""
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache."""
    computed_tokens: int | None
    """Of prompt and answer, those that have KV."""
    generated_tokens: int
    kv_blocks: int | None
    """Blocks held, shared ones included."""
    ttft_ms: float | None
    """Null before the first token."""
    predicted_end_ms: float | None
    """From now, if it goes on to `max_tokens` at its pace so far; null before its second token."""


class LiveRequest(BaseModel):
    id: str
    """Its `X-Request-Id`."""
    object: Literal["request"]
    age_ms: float
    """Since its arrival."""
    sequences: list[LiveSequence]
    """One per prompt and choice that has not ended."""


class LiveRequestList(BaseModel):
    object: Literal["list"]
    data: list[LiveRequest]
    has_more: bool
    """Whether there are more sequences than are told."""


class RequestDeletion(BaseModel):
    id: str
    object: Literal["request"] = "request"
    deleted: Literal[True] = True
