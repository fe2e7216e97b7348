"""Thinking before an answer: whether a model does, whether the prompt begins it, and how many tokens it took."""

from collections.abc import Iterable, Sequence

from server.core.tokenizer_protocol import Tokenizer
from server.tools.readers import THINK_CLOSE, THINK_OPEN

_OPEN, _CLOSE = THINK_OPEN.encode(), THINK_CLOSE.encode()
_NUM_LAST_TOKENS = 16  # more than enough to spell the mark and the white space after it


def mentions_thinking(template: str) -> bool:
    return THINK_OPEN in template or THINK_CLOSE in template


def begins_thinking(prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends with the opening mark, so that the model thinks from its first token on."""
    end = tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(THINK_OPEN)


class NoThinking:
    """Counts no tokens, for models that do not think."""

    num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        pass


class ThinkingCounter:
    """Counts the tokens of the thinking, those of its marks included.

    Works on the tokens' bytes: text comes later than its tokens where a stop string may begin.
    """

    def __init__(self, tokenizer: Tokenizer, starts_inside: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._is_inside = starts_inside
        self._is_over = False
        self._num_seen = 0
        self._tail = b""
        """Inside the thinking, the last bytes, in which the closing mark may begin; before it, all bytes that may be
        the opening mark."""

    @property
    def num_tokens(self) -> int:
        return self._num_seen if self._is_inside else 0

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._num_seen += 1
            self._tail += self._token_bytes(token_id)
            if not self._is_inside:
                self._look_for_open()
            if self._is_inside:
                self._is_over = _CLOSE in self._tail
                self._tail = self._tail[1 - len(_CLOSE) :]

    def _look_for_open(self) -> None:
        self._tail = self._tail.lstrip(b" \t\r\n")
        if self._tail.startswith(_OPEN):
            self._is_inside, self._tail = True, self._tail[len(_OPEN) :]
        else:
            self._is_over = not _OPEN.startswith(self._tail)
