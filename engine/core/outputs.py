"""What a caller of the async engine receives."""

import msgspec

from engine.core.batch import TokenLogprobs
from engine.core.request import FinishReason
from engine.core.stats import RequestTimings


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The news of one request since the last output: usually one token, or those of a step. Text is held back while a
    character or a possible stop string is incomplete, so `text` may be empty; concatenated, the texts are the whole
    completion.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first output only, one per prompt token, the first None."""
    embedding: bytes = b""
    """Of the prompt, when asked for; little-endian float32."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_output_tokens: int
    """Tokens generated so far, this output's included."""
    timings: RequestTimings | None = None
    """On the first output (no gaps yet) and on the last (complete)."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, if one did; None for EOS, as the OpenAI API has it. `deadline` or
    `abort` where it was cut, which `finish_reason` tells from a stop string."""

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
