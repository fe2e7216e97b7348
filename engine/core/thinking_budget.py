"""How long a model may think: a function of the tokens so far, so it is the same after preemption or a restart."""

from collections.abc import Sequence

import msgspec

START_WITHIN = 4
"""Thinking begins with one of the first tokens (some models write a line break before it), or not at all."""
_MAX_OVER = 3
"""Tokens that a character may need to end, if each is a byte of it."""


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output between two tokens, of which at most `max_tokens` may come; then the end is forced: a few tokens
    later where the request's grammar does not allow it yet.

    <start> t t t t <end> answer          thinking is what lies between
    t t t t <end> answer                  begun in the prompt
    """

    max_tokens: int
    end_id: int
    start_id: int | None = None
    """None where the prompt begins it."""

    def forced_id(self, output_token_ids: Sequence[int]) -> int | None:
        """The token that must come next, if one must, and if the request's grammar allows it. Where that refuses it for
        longer, the mark has been spelt out of other tokens, and this one would stand in the answer."""
        begin = self._begin(output_token_ids)
        is_due = begin is not None and 0 <= len(output_token_ids) - begin - self.max_tokens <= _MAX_OVER
        return self.end_id if is_due and self.end_id not in output_token_ids[begin:] else None

    def _begin(self, output_token_ids: Sequence[int]) -> int | None:
        if self.start_id is None:
            return 0
        first = output_token_ids[:START_WITHIN]
        return first.index(self.start_id) + 1 if self.start_id in first else None
