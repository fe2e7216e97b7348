"""The request's prompts as token ids."""

import asyncio

from server.generation.prompts import EncodedPrompt, prompt_limit, truncate
from server.protocol.completions import CompletionRequest
from server.protocol.prompts import Prompt
from server.text import Tokenizer


async def encode_prompts(request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> list[EncodedPrompt]:
    """Text is tokenized in another thread: a long one must not hold up the streams of others."""
    if any(isinstance(prompt, str) for prompt in request.prompt):
        return await asyncio.to_thread(_encode_all, request, tokenizer, max_model_len)
    return _encode_all(request, tokenizer, max_model_len)


def _encode_all(request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> list[EncodedPrompt]:
    limit = prompt_limit(request.truncate_prompt_tokens, max_model_len - request.max_tokens)
    return [truncate(_encode(prompt, request, tokenizer), limit) for prompt in request.prompt]


def _encode(prompt: Prompt, request: CompletionRequest, tokenizer: Tokenizer) -> EncodedPrompt:
    if isinstance(prompt, str):
        return EncodedPrompt(tokenizer.encode(prompt, request.add_special_tokens), prompt)
    return EncodedPrompt(prompt, None)
