"""POST /v1/prefill: what a decode server asks of a prefill server, and the answer. Not for clients."""

from typing import Annotated

from pydantic import BaseModel, Field, PlainValidator

from server.protocol.answers import Timings
from server.protocol.prompts import token_ids
from server.protocol.wire import MAX_INT32, ClosedModel, Int32


class PrefillRequest(ClosedModel):
    token_ids: Annotated[list[int], PlainValidator(token_ids, json_schema_input_type=list[int])]
    stored_tokens: int = Field(0, ge=0, le=MAX_INT32, description="First tokens whose blocks are in the KV store.")
    kv_fingerprint: str = Field(description="Must be that of this server's engine.", max_length=64)
    cache_salt: str = Field("", max_length=2048, description="As the decode server's engine has it, with the API key.")
    adapter: str = Field("", description="Digest of the adapter; empty for the model as it is.", max_length=128)
    priority: Int32 = 0
    tenant: str = Field("", max_length=128, description="Tenants share this server by their weights, too.")
    weight: float = Field(1.0, gt=0, le=1000)
    share: float = Field(1.0, gt=0, le=1)
    max_queue_ms: Int32 | None = Field(None, ge=1)
    deadline_ms: Int32 | None = Field(None, ge=1)


class PrefillResponse(BaseModel):
    stored_tokens: int
    """First tokens whose blocks are in the KV store now."""
    timings: Timings
