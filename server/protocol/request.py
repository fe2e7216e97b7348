"""The fields that all requests for the engine share: model, priority, prefix sharing and time limits."""

from typing import Literal

from pydantic import ConfigDict, Field

from server.protocol.cache_steering import MAX_CACHE_KEY, RETENTION_S, PromptCacheOptions, Retention
from server.protocol.wire import Int32, Text, WireModel


class RequestFields(WireModel):
    """Fields of all endpoints that need the engine. Fields that an endpoint does not define: `protocol.refusals`."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = Field(None, description="A name from /v1/models; may be left out.")
    truncate_prompt_tokens: Int32 | None = Field(
        None, ge=-1, description="Keep this many tokens of the prompt; -1 as many as fit beside max_tokens."
    )
    truncation_side: Literal["left", "right"] = Field(
        "left", description="Where truncate_prompt_tokens cuts: left keeps the prompt's end, right its beginning."
    )
    priority: Int32 = Field(0, description="Lower values run first among the requests of one API key.")
    cache_salt: Text = Field("", max_length=1024, description="Cached prefixes are shared only among equal salts.")
    prompt_cache_key: Text | None = Field(
        None, max_length=MAX_CACHE_KEY, description="Name under which /v1/cache tells of what is cached, and drops it."
    )
    prompt_cache_retention: Retention | None = Field(
        None, description="24h retains the prompt; with in_memory it is not written to the KV store."
    )
    prompt_cache_options: PromptCacheOptions | None = None
    max_queue_ms: Int32 | None = Field(
        None,
        ge=1,
        description="A request not scheduled within this time ends with 408; with 429 at once if it would wait longer.",
    )
    deadline_ms: Int32 | None = Field(
        None,
        ge=1,
        description="The request ends this long after its arrival: with 408, or with the tokens it has by then.",
    )
    request_id: Text | None = Field(None, description="Part of the response's id.")

    @property
    def retain_s(self) -> float:
        """Seconds for which the request asks that its prompt be retained; 0 if it does not."""
        options = self.prompt_cache_options or PromptCacheOptions()
        return max(RETENTION_S.get(each or "", 0.0) for each in (self.prompt_cache_retention, options.ttl))
