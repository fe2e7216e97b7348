"""The request's prompts as token ids."""

import asyncio
from dataclasses import dataclass

from server.errors import BadRequestError
from server.protocol.completions import CompletionRequest
from server.protocol.prompts import Prompt
from server.text import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str | None
    """As the client wrote it; None where it sent token ids or had the text cut."""


async def encode_prompts(request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> list[EncodedPrompt]:
    """Text is tokenized in another thread: a long one must not hold up the streams of others."""
    if any(isinstance(prompt, str) for prompt in request.prompt):
        return await asyncio.to_thread(_encode_all, request, tokenizer, max_model_len)
    return _encode_all(request, tokenizer, max_model_len)


def _encode_all(request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> list[EncodedPrompt]:
    limit = _limit(request, max_model_len)
    return [_truncate(_encode(prompt, request, tokenizer), limit) for prompt in request.prompt]


def _encode(prompt: Prompt, request: CompletionRequest, tokenizer: Tokenizer) -> EncodedPrompt:
    if isinstance(prompt, str):
        return EncodedPrompt(tokenizer.encode(prompt, request.add_special_tokens), prompt)
    return EncodedPrompt(prompt, None)


def _limit(request: CompletionRequest, max_model_len: int) -> int | None:
    """How many tokens to keep from each prompt's end; None keeps all."""
    match request.truncate_prompt_tokens:
        case 0:
            raise BadRequestError("truncate_prompt_tokens must be at least 1, or -1.", "truncate_prompt_tokens")
        case -1:
            return max(1, max_model_len - request.max_tokens)
        case limit:
            return limit


def _truncate(prompt: EncodedPrompt, limit: int | None) -> EncodedPrompt:
    if limit is None or len(prompt.token_ids) <= limit:
        return prompt
    return EncodedPrompt(prompt.token_ids[-limit:], None)
