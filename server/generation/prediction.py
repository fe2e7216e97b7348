"""A request's predicted output as token ids, which the engine drafts and the usage counts."""

import asyncio

from engine.core.config import EngineInfo
from server.core.errors import BadRequestError
from server.core.tokenizer_protocol import Tokenizer
from server.protocol.generation import GenerationParams


async def predicted_token_ids(request: GenerationParams, tokenizer: Tokenizer, info: EngineInfo) -> tuple[int, ...]:
    """Returns the prediction's tokens; none without a prediction. Raises BadRequestError for more than any answer can
    have. They are tokenized in another thread: a long text must not block the event loop."""
    if request.prediction is None:
        return ()
    token_ids = await asyncio.to_thread(tokenizer.encode, request.prediction.text, False)
    if len(token_ids) > info.max_model_len:
        raise BadRequestError(
            f"prediction has {len(token_ids)} tokens, more than the {info.max_model_len} of this model's context: "
            "send the part of it that the answer can have.",
            "prediction",
        )
    return tuple(token_ids)
