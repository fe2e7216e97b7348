"""What the endpoints' formats of logprobs have in common, and `prompt_logprobs`, whose format is the same for all."""

from collections.abc import Iterable, Iterator
from typing import Any

from engine.core.batch import TokenLogprobs
from server.core.tokenizer_protocol import Tokenizer, token_name

# JSON has no -Infinity.
_LOWEST = -9999.0


def prompt_logprobs(
    scores: Iterable[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer
) -> Iterator[dict[str, Any] | None]:
    """Returns one object per prompt token, keyed by token id; None for the first token, which has no logprob."""
    return (None if score is None else _by_id(score, num_top, tokenizer) for score in scores)


def finite(logprob: float) -> float:
    """Returns a number that JSON has. NaN becomes the lowest one, too: the comparison with NaN is false."""
    return max(_LOWEST, logprob)


def _by_id(score: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(rank, *entry) for rank, entry in enumerate(score.top[:num_top], start=1)]
    entries = {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_name(tokenizer, token_id)}
        for rank, token_id, logprob in [*ranked, (score.rank, score.token_id, score.logprob)]
    }
    return entries
