"""Prompts as token ids, truncated where the request allows that."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from server.core.errors import BadRequestError
from server.core.tokenizer_protocol import Tokenizer
from server.protocol.prompts import Prompt
from server.protocol.request import RequestFields


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str | None
    """The text that was tokenized; None where the client sent token ids or the prompt was truncated."""


@dataclass(frozen=True, slots=True)
class PromptCut:
    """What is kept of a prompt's tokens."""

    limit: int | None = None
    """Maximum number of tokens; None keeps all."""
    side: Literal["left", "right"] = "left"
    """The side on which tokens are left out."""

    @classmethod
    def of(cls, request: RequestFields, max_prompt_tokens: int) -> "PromptCut":
        """Returns the cut that the request asks for. `max_prompt_tokens` fit into the context beside the output. Raises
        BadRequestError."""
        limit = request.truncate_prompt_tokens
        if limit == 0:
            raise BadRequestError("truncate_prompt_tokens must be at least 1, or -1.", "truncate_prompt_tokens")
        return cls(max(1, max_prompt_tokens) if limit == -1 else limit, request.truncation_side)

    def apply(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """Returns the prompt's kept tokens, without their text; all of it, unchanged, if nothing is cut."""
        if self.limit is None or len(prompt.token_ids) <= self.limit:
            return prompt
        kept = prompt.token_ids[-self.limit :] if self.side == "left" else prompt.token_ids[: self.limit]
        return EncodedPrompt(kept, None)


async def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, add_special_tokens: bool, cut: PromptCut
) -> list[EncodedPrompt]:
    """Returns the prompts, each cut. Texts are tokenized in another thread: a long one must not block the event
    loop."""

    def encode(prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, str):
            return cut.apply(EncodedPrompt(tokenizer.encode(prompt, add_special_tokens), prompt))
        return cut.apply(EncodedPrompt(prompt, None))

    def encode_all() -> list[EncodedPrompt]:
        return [encode(prompt) for prompt in prompts]

    return await asyncio.to_thread(encode_all) if any(isinstance(each, str) for each in prompts) else encode_all()
