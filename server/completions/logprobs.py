"""Log-probabilities in the shape of the completions API: OpenAI's four lists."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from engine.core.batch import TokenLogprobs
from server.core.tokenizer_protocol import Tokenizer, token_name
from server.generation.logprobs import finite


class LogprobsFormatter:
    """Makes OpenAI's lists for one choice, piece by piece, as iterators, to be read in that order. Keeps count of the
    text, for `text_offset`."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, names_as_ids: bool, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._names_as_ids = names_as_ids
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, token_ids: Sequence[int], scores: Iterable[TokenLogprobs | None], text: str) -> dict[str, Any]:
        """Returns the lists of the echoed prompt. `text` is what is echoed: the tokens' texts may have one leading
        space more."""
        return {
            "tokens": (self._name(token_id) for token_id in token_ids),
            "token_logprobs": (None if score is None else finite(score.logprob) for score in scores),
            "top_logprobs": (None if score is None else self._top(score) for score in scores),
            "text_offset": self._prompt_offsets(token_ids, len(text)),
        }

    def generated(self, scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "tokens": (self._name(score.token_id) for score in scores),
            "token_logprobs": (finite(score.logprob) for score in scores),
            "top_logprobs": (self._top(score) for score in scores),
            "text_offset": (self._advance(score.token_id) for score in scores),
        }

    def _prompt_offsets(self, token_ids: Sequence[int], text_length: int) -> Iterator[int]:
        offsets = [self._advance(token_id) for token_id in token_ids]
        surplus = self._offset - text_length
        self._offset = text_length
        self._decoder.reset()
        return (min(max(0, offset - surplus), text_length) for offset in offsets)

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """Returns the logprobs of the most likely tokens and of the token itself. Of tokens of the same name the most
        likely one counts."""
        top: dict[str, float] = {}
        for token_id, logprob in (*score.top[: self._num_top], (score.token_id, score.logprob)):
            top.setdefault(self._name(token_id), finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._names_as_ids else token_name(self._tokenizer, token_id)

    def _advance(self, token_id: int) -> int:
        """Returns where in the text the token begins, and goes on behind it. A part of a character begins where the
        character does."""
        offset = self._offset
        if token_id not in self._skipped_ids:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def join_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the lists of both, concatenated."""
    return {name: chain(first[name], second[name]) for name in first}
