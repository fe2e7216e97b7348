"""Request and response models of POST /tokenize and POST /detokenize."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from server.protocol.chat import ConversationParams
from server.protocol.generation import wrong
from server.protocol.wire import ClosedModel, Text, TokenIds


class _TokenizeParams(ClosedModel):
    model: Text | None = None
    return_token_strs: bool = Field(False, description="Also return each token's text.")


class TokenizeTextRequest(_TokenizeParams):
    prompt: Text
    add_special_tokens: bool = True


class TokenizeChatRequest(ConversationParams, _TokenizeParams):
    """Asks for the tokens of the prompt that the messages make."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "TokenizeChatRequest":
        self.check_conversation()
        return self


def _tag(body: Any) -> str:
    has_messages = "messages" in body if isinstance(body, dict) else isinstance(body, TokenizeChatRequest)
    return "<messages>" if has_messages else "<prompt>"


def _check_one_is_given(body: Any) -> Any:
    if isinstance(body, dict) and (body.get("prompt") is None) == (body.get("messages") is None):
        raise wrong("prompt", "or messages must be given, and not both")
    return body


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("<prompt>")] | Annotated[TokenizeChatRequest, Tag("<messages>")],
    Discriminator(_tag),
    BeforeValidator(_check_one_is_given),
]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(ClosedModel):
    tokens: TokenIds
    model: Text | None = None
    skip_special_tokens: bool = False


class DetokenizeResponse(BaseModel):
    prompt: str
