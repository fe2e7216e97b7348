"""The fields that say what every request for the engine's work says: for which model, how urgent, shared with whom."""

from pydantic import ConfigDict, Field

from server.protocol.wire import Int32, Text, WireModel


class RequestFields(WireModel):
    """What one adds here, each such endpoint takes. Fields that an endpoint does not define: `protocol.refusals`."""

    model_config = ConfigDict(extra="allow")

    model: Text | None = Field(None, description="A name from /v1/models; may be left out.")
    truncate_prompt_tokens: Int32 | None = Field(
        None, ge=-1, description="Keep this many tokens from the prompt's end; -1 as many as fit beside max_tokens."
    )
    priority: Int32 = Field(0, description="Lower runs first of the same API key's.")
    cache_salt: Text = Field("", max_length=1024, description="Prefixes are shared only among equal salts.")
    max_queue_ms: Int32 | None = Field(
        None, ge=1, description="Not scheduled within this time, it ends with 408; 429 at once if it would wait longer."
    )
    deadline_ms: Int32 | None = Field(
        None, ge=1, description="Ends so long after its arrival: with 408, or after the first token with what there is."
    )
    request_id: Text | None = Field(None, description="Part of the response's id.")
