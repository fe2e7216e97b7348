"""How far the draft model's own keys and values have been computed, by request and by block; torch-free.

They lie in the same blocks as the target model's, and are not always there: only steps that need them compute them. A
block is complete if it holds both. Positions [0, d) of a request have both, d = request.num_drafted_tokens; after a
match that is the part of the cached prefix that is complete.
"""

from collections.abc import Iterable
from typing import Protocol

from engine.core.request import Request

MAX_BEHIND = 512
"""Tokens that a step's share of one request makes up for, at most: the step must not get much longer by them."""


class DraftKV(Protocol):
    def start(self, request: Request, num_matched: int) -> None:
        """Notes the request's new block table, of which the first `num_matched` blocks were found in the cache."""

    def allocated(self, block_ids: Iterable[int]) -> None:
        """Notes blocks that were handed out and hold nothing yet."""

    def span(self, request: Request, num_tokens: int) -> tuple[int, int] | None:
        """Returns the positions that the draft model is to compute in a step that computes the next `num_tokens` of the
        request; None if none."""

    def computed(self, request: Request, own_end: int, end: int) -> None:
        """Notes that the draft model has computed the request's own tokens before `own_end`, and then its draft tokens,
        of which those before `end` are the request's own now."""


class NoDraftKV:
    """The state where no draft model has KV of its own."""

    def start(self, request: Request, num_matched: int) -> None:
        pass

    def allocated(self, block_ids: Iterable[int]) -> None:
        pass

    def span(self, request: Request, num_tokens: int) -> tuple[int, int] | None:
        return None

    def computed(self, request: Request, own_end: int, end: int) -> None:
        raise AssertionError("there is no draft model with KV of its own")


class OwnDraftKV:
    """The state where there is one."""

    def __init__(self, block_size: int, *, is_of_head: bool = False) -> None:
        """`is_of_head`: whether the draft model is an MTP head. It computes draft tokens with hidden states of its own;
        those that are accepted it computes again, with the model's."""
        self._block_size = block_size
        self._is_of_head = is_of_head
        self._complete: set[int] = set()

    def start(self, request: Request, num_matched: int) -> None:
        self.allocated(request.block_table[num_matched:])
        matched = enumerate(request.block_table[:num_matched])
        num_complete = next((index for index, block in matched if block not in self._complete), num_matched)
        request.num_drafted_tokens = num_complete * self._block_size

    def allocated(self, block_ids: Iterable[int]) -> None:
        self._complete.difference_update(block_ids)

    def span(self, request: Request, num_tokens: int) -> tuple[int, int] | None:
        if not request.may_speculate:
            return None
        start = request.num_drafted_tokens
        return start, min(request.num_computed_tokens, start + MAX_BEHIND) + num_tokens

    def computed(self, request: Request, own_end: int, end: int) -> None:
        end = own_end if self._is_of_head else end
        first, last = request.num_drafted_tokens // self._block_size, end // self._block_size
        self._complete.update(request.block_table[first:last])
        request.num_drafted_tokens = end
