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
    priority: Int32 = Field(0, description="Lower runs first.")
    cache_salt: Text = Field("", max_length=1024, description="Prefixes are shared only among equal salts.")
    request_id: Text | None = Field(None, description="Part of the response's id.")
