"""POST /tokenize and POST /detokenize."""

from pydantic import BaseModel, Field

from server.protocol.wire import Text, TokenIds, WireModel


class TokenizeRequest(WireModel):
    prompt: Text
    model: Text | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = Field(False, description="Also tell each token's text.")


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireModel):
    tokens: TokenIds
    model: Text | None = None
    skip_special_tokens: bool = False


class DetokenizeResponse(BaseModel):
    prompt: str
