"""The fields that all requests for the engine share: model, priority, prefix sharing and time limits."""

from typing import Literal

from pydantic import ConfigDict, Field

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
