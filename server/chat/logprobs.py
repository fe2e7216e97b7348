"""Log-probabilities in the shape of the chat API: one object per token."""

from collections.abc import Sequence
from typing import Any

from engine.core.batch import TokenLogprobs
from server.core.tokenizer_protocol import Tokenizer, token_name
from server.generation.logprobs import finite


class ChatLogprobsFormatter:
    def __init__(self, tokenizer: Tokenizer, num_top: int, names_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._names_as_ids = names_as_ids

    def format(self, scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the logprobs as an iterator: entries are made when they are encoded."""
        return {"content": (self._entry(score) for score in scores), "refusal": None}

    def _entry(self, score: TokenLogprobs) -> dict[str, Any]:
        top = [self._scored(token_id, logprob) for token_id, logprob in score.top[: self._num_top]]
        return {**self._scored(score.token_id, score.logprob), "top_logprobs": top}

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = f"token_id:{token_id}" if self._names_as_ids else token_name(self._tokenizer, token_id)
        return {"token": name, "logprob": finite(logprob), "bytes": list(self._tokenizer.token_bytes(token_id))}
