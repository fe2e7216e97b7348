"""POST /v1/embeddings: request parameters and response models."""

from typing import Literal

from pydantic import BaseModel, Field

from server.protocol.answers import PromptTokensDetails, Timings
from server.protocol.prompts import Prompts
from server.protocol.request import RequestFields
from server.protocol.wire import Int32


class EmbeddingRequest(RequestFields):
    input: Prompts
    encoding_format: Literal["float", "base64"] = Field("float", description="base64 is of little-endian float32.")
    dimensions: Int32 | None = Field(None, description="Only the model's own, which is the default.")
    add_special_tokens: bool = True


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingResponse(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    timings: Timings
