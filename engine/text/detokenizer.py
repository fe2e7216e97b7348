"""Token ids -> text, one token at a time: characters are held back until complete, stop strings are found and cut.

It works on bytes, not by decoding windows of tokens again: every token has its own bytes, so the cost of a delta does
not depend on the text before it, and the concatenated deltas are the full decode by construction.
"""

import codecs
from collections.abc import Sequence, Set
from typing import Protocol

from engine.text.stop_strings import StopStringFinder


class TokenTable(Protocol):
    """The part of a tokenizer that the detokenizer uses."""

    @property
    def special_ids(self) -> Set[int]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes this token adds in the middle of a text: perhaps only a part of a character."""


class IncrementalDetokenizer:
    """Decodes one growing sequence. Each `append` returns the text that became certain with that token.

    A stop string is looked for in the text that ends with token number `min_tokens` or a later one. The first to be
    completed ends the text (of several completed by the same character, the longest); then `stop_string` names it,
    and nothing may be appended any more.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown_token_ids: Sequence[int] = (),
    ) -> None:
        """Special tokens are skipped if `skip_special_tokens`, except `shown_token_ids`."""
        self._token_bytes = table.token_bytes
        self._skipped_ids: Set[int] = table.special_ids if skip_special_tokens else frozenset()
        if shown_token_ids:
            self._skipped_ids = self._skipped_ids - frozenset(shown_token_ids)
        self._finder = StopStringFinder(stop) if stop else None
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._incomplete = b""  # the beginning of a character, at most 3 bytes
        self._held = ""  # may yet turn out to be the beginning of a stop string
        self.stop_string: str | None = None

    def append(self, token_id: int) -> str:
        """Returns the text that this token makes certain: often all of its own, perhaps none."""
        self._num_tokens += 1
        if token_id in self._skipped_ids:
            return ""
        data = self._incomplete + self._token_bytes(token_id)
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[num_used:]
        return self._release(text)

    def flush(self) -> str:
        """Returns the text still held back, at the sequence's end. Bytes of an incomplete character become U+FFFD."""
        text = self._release(codecs.utf_8_decode(self._incomplete, "replace", True)[0])
        if self.stop_string is None:
            text += self._held
        self._incomplete, self._held = b"", ""
        return text

    def _release(self, text: str) -> str:
        if self._finder is None or not text:
            return text
        held = self._held + text
        found = self._finder.feed(text, may_stop=self._num_tokens >= self._min_tokens)
        if found is None:
            num_certain = len(held) - self._finder.num_held
            self._held = held[num_certain:]
            return held[:num_certain]
        self.stop_string, self._held = found.string, ""
        end = len(held) - len(text) + found.end
        return held[: end if self._includes_stop else end - len(found.string)]
