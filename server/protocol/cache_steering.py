"""What requests ask of the prefix cache, in OpenAI's words and in Anthropic's."""

from typing import Literal

from pydantic import Field

from server.protocol.wire import WireModel

MAX_CACHE_KEY = 1024

Retention = Literal["in_memory", "in-memory", "24h"]
RETENTION_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0}
"""Seconds of the times to live that the APIs have."""


class PromptCacheOptions(WireModel):
    """OpenAI's newer options. Prompts are cached from their beginning on, whatever the mode is."""

    ttl: Literal["30m", "1h", "12h", "24h"] | None = Field(None, description="How long the prompt is retained.")


class CacheControl(WireModel):
    """Anthropic's mark of what is to be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Cacheable(WireModel):
    """What may have Anthropic's mark."""

    cache_control: CacheControl | None = Field(None, description="Has the whole prompt retained for its time to live.")
