"""A prompt as token ids, and how it is cut when the request allows that."""

from dataclasses import dataclass

from server.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str | None
    """What was tokenized; None where the client sent token ids or had the text cut."""


def prompt_limit(truncate_prompt_tokens: int | None, room: int) -> int | None:
    """How many tokens to keep from a prompt's end; None keeps all. `room` is what fits beside the output."""
    match truncate_prompt_tokens:
        case 0:
            raise BadRequestError("truncate_prompt_tokens must be at least 1, or -1.", "truncate_prompt_tokens")
        case -1:
            return max(1, room)
        case limit:
            return limit


def truncate(prompt: EncodedPrompt, limit: int | None) -> EncodedPrompt:
    if limit is None or len(prompt.token_ids) <= limit:
        return prompt
    return EncodedPrompt(prompt.token_ids[-limit:], None)
