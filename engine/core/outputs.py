"""Outputs that the async engine streams to its caller."""

from collections.abc import Iterable

import msgspec

from engine.core.batch import TokenLogprobs
from engine.core.request import FinishReason
from engine.core.stats import RequestTimings


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one request has generated since its last output: usually one token, or those of a step.

    Text is held back while a character or a possible stop string is incomplete, so `text` may be empty; concatenated,
    the texts are the whole completion.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each of `token_ids`, if requested."""
    prompt_logprobs: Iterable[TokenLogprobs | None] | None = None
    """Log-probabilities of the prompt's tokens, if requested: on the first output only, one per prompt token, the first
    None."""
    embedding: bytes = b""
    """Embedding of the prompt, if requested; little-endian float32."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_stored_tokens: int = 0
    """Prompt tokens whose blocks are in the KV store, if the request was to wait for that."""
    num_output_tokens: int
    """Tokens generated so far, this output's included."""
    timings: RequestTimings | None = None
    """Timings of the request: on the first output (no gaps yet) and on the last (complete)."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the request, if one did; None for EOS, as in the OpenAI API.
    `deadline` or `abort` if it was cut off; `finish_reason` distinguishes these from a stop string."""

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
