"""Response models of GET and DELETE /v1/cache."""

from typing import Literal

from pydantic import BaseModel


class CacheKey(BaseModel):
    """What is cached of the requests with one `prompt_cache_key`, after their ends. Tokens are those of full blocks."""

    prompt_cache_key: str | None
    """null for requests without a key."""
    object: Literal["cache_key"] = "cache_key"
    tokens: int
    """Tokens that are in memory or on disk."""
    memory_tokens: int
    disk_tokens: int
    retained_tokens: int
    """The part of `memory_tokens` that is retained, and makes room last."""
    idle_ms: float
    """Time since the last of these requests ended."""
    retained_ms: float
    """Time for which something of it is retained yet."""


class CacheKeyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[CacheKey]
    has_more: bool
    """Whether there are more keys than are listed."""


class CacheDeletion(BaseModel):
    prompt_cache_key: str | None
    """null if it was all keys."""
    object: Literal["cache_key"] = "cache_key"
    deleted: Literal[True] = True
