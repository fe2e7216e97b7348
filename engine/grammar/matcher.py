"""The state of one request's grammar: masks of the tokens it allows next, and the tokens it forces."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llguidance import LLMatcher

from engine.grammar.jump_forward import Alphabet, JumpForward

# Limits of one request's CPU time in the engine's steps, for which all other requests wait. A grammar that is not
# ambiguous takes less than a tenth of it, mostly less than a hundredth.
MAX_SPENT_S, MAX_SPENT_PER_TOKEN_S = 0.2, 0.005
MAX_RECOMPILATIONS = 32  # of one request's matcher: its step waits while the grammar is compiled again
# Drafting counts towards these limits, too, but must not end a request that could go on without: it stops at a tenth.
_DRAFTING_SHARE = 0.1
_MAX_LOOKAHEAD_S = 0.002  # of one step, its own mask included

_NO_TEXT = "NoExtension"  # how errors begin that are about what the grammar says, and not about limits


class Matcher:
    """The constraint of one request. Its state is a function of the generated tokens, all of which each call gets."""

    def __init__(
        self,
        matcher: LLMatcher,
        recompile: Callable[[], tuple[LLMatcher, float]],
        alphabet: Alphabet,
        clock: Callable[[], float],
    ) -> None:
        """`recompile` returns a new matcher in the initial state, which shares nothing, and the seconds that it took.
        `clock` measures the time of all other work."""
        self._matcher = matcher
        self._recompile = recompile
        self._clock = clock
        self._spent_s = 0.0
        self._num_recompilations_left = 0 if matcher.is_error() else MAX_RECOMPILATIONS
        self._num_consumed = 0
        self._mask: bytes | None = None  # after the consumed tokens
        self._jump_forward = JumpForward(alphabet)
        self._num_seen = 0  # output tokens that `_jump_forward` has seen

    def allowed_tokens(self, output_token_ids: Sequence[int], draft: Sequence[int] = ()) -> tuple[bytes, ...]:
        """Returns the masks after the output and after each allowed token of `draft`, as `Constraint` specifies.

        No bit is set if the grammar's limits are reached, or if the output does not follow it. EOS is allowed where the
        text may end; where it must end, no other token is.
        """
        may_speculate = self._spent_share(len(output_token_ids)) <= _DRAFTING_SHARE
        with self._timed():
            masks = self._masks(output_token_ids, draft if may_speculate else ())
        return (bytes(len(masks[0])),) if self._spent_share(len(output_token_ids)) > 1.0 else masks

    def forced_tokens(self, output_token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """Returns the tokens of the forced text, as `Constraint` specifies; none if there is none, or drafting has
        taken too much time."""
        if self._spent_share(len(output_token_ids)) > _DRAFTING_SHARE:
            return ()
        with self._timed() as seconds:
            mask = self._mask_after(output_token_ids)
            self._jump_forward.advance(output_token_ids[self._num_seen :])
            self._num_seen = len(output_token_ids)
            if not self._jump_forward:
                self._jump_forward.look_ahead(mask, self._matcher.deep_copy, lambda: seconds() < _MAX_LOOKAHEAD_S)
            return self._jump_forward.tokens()[:max_tokens]

    @property
    def is_exhausted(self) -> bool:
        met_limit = self._matcher.is_error() and not self._matcher.get_error().startswith(_NO_TEXT)
        return met_limit or self._spent_share(self._num_consumed) > 1.0

    def _spent_share(self, num_tokens: int) -> float:
        return self._spent_s / (MAX_SPENT_S + MAX_SPENT_PER_TOKEN_S * num_tokens)

    @contextmanager
    def _timed(self) -> Iterator[Callable[[], float]]:
        """Adds the time of its block to that of the request; yields a function for the seconds since it began."""
        started_s = self._clock()
        yield lambda: self._clock() - started_s
        self._spent_s += self._clock() - started_s

    def _masks(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> tuple[bytes, ...]:
        mask = self._mask_after(output_token_ids)
        if self._matcher.is_error() and self._num_recompilations_left:
            # Requests with the same grammar share a lexer, and its limits count the work of all of them, drafting
            # included. Which request reaches the limit is chance, so the first recompilation is not charged to it;
            # after that it has a lexer of its own.
            is_own_work = self._num_recompilations_left < MAX_RECOMPILATIONS
            self._num_recompilations_left -= 1
            (self._matcher, took_s), self._num_consumed, self._mask = self._recompile(), 0, None
            self._spent_s += took_s if is_own_work else 0.0
            mask = self._mask_after(output_token_ids)
        return (mask, *self._masks_after(draft))

    def _mask_after(self, output_token_ids: Sequence[int]) -> bytes:
        if self._mask is None or self._num_consumed != len(output_token_ids):
            # Token by token: limits count work per call, too, and whether they are reached must not depend on how often
            # the request was resumed.
            for token_id in output_token_ids[self._num_consumed :]:
                self._matcher.consume_token(token_id)
            self._num_consumed = len(output_token_ids)
            self._mask = _mask(self._matcher)
        return self._mask

    def _masks_after(self, draft: Sequence[int]) -> Iterator[bytes]:
        """Yields the masks after each draft token, from a copy: a draft that reaches a limit must not end the
        request."""
        matcher = self._matcher.deep_copy() if draft else self._matcher
        for token_id in draft:
            if not matcher.try_consume_tokens([token_id]):
                break
            yield _mask(matcher)


def _mask(matcher: LLMatcher) -> bytes:
    bits = matcher.compute_bitmask()
    return bytes(len(bits)) if matcher.is_error() else bits  # in an error it would allow EOS
