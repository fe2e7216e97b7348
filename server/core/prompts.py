"""Prompts as token ids, truncated where the request allows that."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from server.core.errors import BadRequestError
from server.core.tokenizer_protocol import Tokenizer
from server.protocol.prompts import Prompt


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str | None
    """The text that was tokenized; None where the client sent token ids or the prompt was truncated."""


async def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, add_special_tokens: bool, limit: int | None
) -> list[EncodedPrompt]:
    """Returns the prompts, each truncated to its last `limit` tokens. Texts are tokenized in another thread: a long one
    must not block the event loop."""

    def encode(prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, str):
            return truncate(EncodedPrompt(tokenizer.encode(prompt, add_special_tokens), prompt), limit)
        return truncate(EncodedPrompt(prompt, None), limit)

    def encode_all() -> list[EncodedPrompt]:
        return [encode(prompt) for prompt in prompts]

    return await asyncio.to_thread(encode_all) if any(isinstance(each, str) for each in prompts) else encode_all()


def prompt_limit(truncate_prompt_tokens: int | None, max_prompt_tokens: int) -> int | None:
    """Returns how many tokens to keep from a prompt's end; None keeps all. `max_prompt_tokens` fit into the context
    beside the output. Raises BadRequestError."""
    match truncate_prompt_tokens:
        case 0:
            raise BadRequestError("truncate_prompt_tokens must be at least 1, or -1.", "truncate_prompt_tokens")
        case -1:
            return max(1, max_prompt_tokens)
        case limit:
            return limit


def truncate(prompt: EncodedPrompt, limit: int | None) -> EncodedPrompt:
    """Returns the prompt's last `limit` tokens, without their text; all of it, unchanged, if `limit` is None."""
    if limit is None or len(prompt.token_ids) <= limit:
        return prompt
    return EncodedPrompt(prompt.token_ids[-limit:], None)
