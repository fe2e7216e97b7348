"""POST /tokenize and POST /detokenize."""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import InvalidParameterError
from server.core.tokenizer_protocol import token_name
from server.generation.whole_answer import answer_of, reserve_memory
from server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from server.routes.documented import error_responses
from server.routes.json_route import JsonRoute
from server.runtime.context import context_of

SLICE = 1000
"""Tokens that are encoded before other tasks have their turn."""

TOKEN_BYTES = 40
"""Memory that a token takes until it is written."""

router = APIRouter(route_class=JsonRoute, tags=["Tokenizer"])


@router.post("/tokenize", response_model=TokenizeResponse, responses=error_responses(400, 401, 404, 413, 415, 429, 503))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Text, or a conversation's prompt, to token ids."""
    context = context_of(request)
    context.check_model(body.model)
    tokenizer = context.backend.tokenizer
    if isinstance(body, TokenizeTextRequest):
        tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens)
    else:
        tokens = (await context.backend.chat.encode(body)).token_ids
    reserve_memory(request, len(tokens) * TOKEN_BYTES)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": context.backend.engine.info.max_model_len,
        "tokens": iter(tokens),
    }
    if body.return_token_strs:
        answer["token_strs"] = (token_name(tokenizer, token) for token in tokens)
    return await answer_of(answer, {}, context.settings.stall_timeout, SLICE)


@router.post("/detokenize", responses=error_responses(400, 401, 404, 413, 415, 429, 503))
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Token ids to text: those of the model, and what tokens the tokenizer has beyond them."""
    context = context_of(request)
    context.check_model(body.model)
    vocab_size, tokenizer = context.backend.engine.info.vocab_size, context.backend.tokenizer
    if any(token >= vocab_size and not tokenizer.has_token(token) for token in body.tokens):
        raise InvalidParameterError("tokens", f"tokens has an id outside the vocabulary [0, {vocab_size}).")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, body.skip_special_tokens)
    return DetokenizeResponse(prompt=text)
