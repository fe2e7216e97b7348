"""Limit of a model's thinking tokens: a function of the tokens so far, so the same after preemption or a restart."""

from collections.abc import Sequence

import msgspec

START_WITHIN = 4
"""The start mark counts only among this many first tokens (some models write a line break before it)."""
_MAX_OVER = 3
"""Tokens beyond the budget that an unfinished character may need, if each token is one of its bytes."""


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits the thinking tokens, those between a start and an end mark, to `max_tokens`; then the end mark is forced,
    a few tokens later if the request's grammar does not allow it yet.

    <start> t t t t <end> answer          thinking is what lies between
    t t t t <end> answer                  begun in the prompt
    """

    max_tokens: int
    end_id: int
    start_id: int | None = None
    """Token that starts the thinking; None if the prompt has started it."""

    def forced_id(self, output_token_ids: Sequence[int]) -> int | None:
        """Returns the token that must come next, if one must and the request's grammar allows it.

        The end mark is forced for a few tokens only: if the grammar refuses it for longer, the output has spelt the
        mark with other tokens, and a forced one would be part of the answer.
        """
        begin = self._begin(output_token_ids)
        is_due = begin is not None and 0 <= len(output_token_ids) - begin - self.max_tokens <= _MAX_OVER
        return self.end_id if is_due and self.end_id not in output_token_ids[begin:] else None

    def _begin(self, output_token_ids: Sequence[int]) -> int | None:
        if self.start_id is None:
            return 0
        first = output_token_ids[:START_WITHIN]
        return first.index(self.start_id) + 1 if self.start_id in first else None
