"""The state of one request's grammar: which tokens may come next, and which must."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llguidance import LLMatcher

from engine.grammar.jump_forward import Alphabet, JumpForward

# Of CPU time in the engine's steps, where all others wait. What is not ambiguous takes less than a tenth of it, mostly
# less than a hundredth.
MAX_SPENT_S, MAX_SPENT_PER_TOKEN_S = 0.2, 0.005
MAX_RENEWALS = 32  # of one request's matcher: its step waits while the grammar is compiled again
# What guesses take counts, too, and must not end a request that goes on without them: there are none after a tenth.
_GUESSES_SHARE = 0.1
_MAX_LOOK_S = 0.002  # of one step, its own mask included

_NO_TEXT = "NoExtension"  # how errors begin that are about what the grammar says, and not about limits


class Matcher:
    """A function of the tokens generated, asked for with all of them each time."""

    def __init__(
        self,
        matcher: LLMatcher,
        renewed: Callable[[], tuple[LLMatcher, float]],
        alphabet: Alphabet,
        clock: Callable[[], float],
    ) -> None:
        """`renewed` gives one in the same first state that shares nothing, and the seconds that it took. The clock
        counts what other work takes."""
        self._matcher = matcher
        self._renewed = renewed
        self._clock = clock
        self._spent_s = 0.0
        self._num_renewals_left = 0 if matcher.is_error() else MAX_RENEWALS
        self._num_consumed = 0
        self._mask: bytes | None = None  # after these
        self._foresight = JumpForward(alphabet)
        self._num_heard = 0  # tokens, by the foresight

    def allowed_tokens(self, output_token_ids: Sequence[int], draft: Sequence[int] = ()) -> tuple[bytes, ...]:
        """No bit is set when the grammar's limits are reached, or it was not followed.

        EOS is allowed where the text may end; when it must, nothing else is.
        """
        may_speculate = self._spent_share(len(output_token_ids)) <= _GUESSES_SHARE
        with self._counted():
            masks = self._masks(output_token_ids, draft if may_speculate else ())
        return (bytes(len(masks[0])),) if self._spent_share(len(output_token_ids)) > 1.0 else masks

    def forced_tokens(self, output_token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """None while they are unknown, or the grammar takes long."""
        if self._spent_share(len(output_token_ids)) > _GUESSES_SHARE:
            return ()
        with self._counted() as seconds:
            mask = self._mask_after(output_token_ids)
            self._foresight.hear(output_token_ids[self._num_heard :])
            self._num_heard = len(output_token_ids)
            if not self._foresight:
                self._foresight.look(mask, self._matcher.deep_copy, lambda: seconds() < _MAX_LOOK_S)
            return self._foresight.spelt()[:max_tokens]

    @property
    def is_exhausted(self) -> bool:
        met_limit = self._matcher.is_error() and not self._matcher.get_error().startswith(_NO_TEXT)
        return met_limit or self._spent_share(self._num_consumed) > 1.0

    def _spent_share(self, num_tokens: int) -> float:
        return self._spent_s / (MAX_SPENT_S + MAX_SPENT_PER_TOKEN_S * num_tokens)

    @contextmanager
    def _counted(self) -> Iterator[Callable[[], float]]:
        """Gives the seconds since it began."""
        started_s = self._clock()
        yield lambda: self._clock() - started_s
        self._spent_s += self._clock() - started_s

    def _masks(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> tuple[bytes, ...]:
        mask = self._mask_after(output_token_ids)
        if self._matcher.is_error() and self._num_renewals_left:
            # Requests with the same grammar share a lexer, and its limits count the work of all of them, guesses
            # included. Which request meets the limit is chance, so the first recompilation is not charged to it; after
            # that it has a lexer of its own.
            is_own_work = self._num_renewals_left < MAX_RENEWALS
            self._num_renewals_left -= 1
            (self._matcher, took_s), self._num_consumed, self._mask = self._renewed(), 0, None
            self._spent_s += took_s if is_own_work else 0.0
            mask = self._mask_after(output_token_ids)
        return (mask, *self._masks_after(draft))

    def _mask_after(self, output_token_ids: Sequence[int]) -> bytes:
        if self._mask is None or self._num_consumed != len(output_token_ids):
            # Token by token: limits count work per call, too, and an end must not depend on how often one was resumed.
            for token_id in output_token_ids[self._num_consumed :]:
                self._matcher.consume_token(token_id)
            self._num_consumed = len(output_token_ids)
            self._mask = _mask(self._matcher)
        return self._mask

    def _masks_after(self, draft: Sequence[int]) -> Iterator[bytes]:
        """On a copy: a guess that meets a limit must not be the request's end."""
        scout = self._matcher.deep_copy() if draft else self._matcher
        for token_id in draft:
            if not scout.try_consume_tokens([token_id]):
                break
            yield _mask(scout)


def _mask(matcher: LLMatcher) -> bytes:
    bits = matcher.compute_bitmask()
    return bytes(len(bits)) if matcher.is_error() else bits  # in an error it would allow EOS
