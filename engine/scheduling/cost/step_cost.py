"""Predicts a step's duration from its work: one cost model per phase, and one for draft passes; torch-free."""

from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import NamedTuple

from engine.core.batch import Batch, Phase
from engine.core.request import Request
from engine.scheduling.cost.cost_model import CostModel, Work
from engine.scheduling.cost.experts_read import ExpertsRead

NO_PREFILL: Work = (0, 1, 0, 0, 0)
"""The work of an empty prefill step. Its amounts are: prompt tokens, which take most of the time and so come first, the
step itself, requests, pairs of a token and one that it attends to, and tokens whose logprobs are wanted."""

_TRUSTED_PREFILL: Work = (32, 1, 1 << 30, 1 << 15, 8)
_TRUSTED_DRAFTING: Work = (1, 1 << 30, 1 << 40)  # passes, tokens, and the tokens that these attend to
_TRUSTED_DECODE: Work = (*_TRUSTED_DRAFTING, 1 << 30, 1)  # a decode step must run: mistrust would gain nothing


class TokenPrice(NamedTuple):
    """The predicted price of decoding some requests; 0 where it is unknown."""

    step_s: float
    """Seconds of a decode step with one token of each request."""
    token_s: float
    """Seconds of the next token in that step. Where there are experts, each further one takes at most as long: more of
    those that it chooses are read already."""
    draft_s: float = 0.0
    """Seconds that a request's draft adds however long it is, where the model has recurrent states: after the step,
    these advance by the accepted tokens."""

    def seconds(self, num_drafts: Iterable[int]) -> float:
        """Returns the predicted seconds of the step if it verifies so many draft tokens of each request."""
        drafts = [num for num in num_drafts if num]
        return self.step_s + sum(drafts) * self.token_s + len(drafts) * self.draft_s


class StepCosts:
    """Step durations, which the engine reports and the scheduler asks for. It has no clock of its own."""

    def __init__(self, experts_at_random: Callable[[int], float] = lambda num_tokens: 0.0) -> None:
        """`experts_at_random` returns the share of the model's experts that a step of so many tokens reads if each
        chooses its own at random."""
        self._experts = ExpertsRead(experts_at_random)
        self._models = {Phase.PREFILL: CostModel(_TRUSTED_PREFILL), Phase.DECODE: CostModel(_TRUSTED_DECODE)}
        self._drafting = CostModel(_TRUSTED_DRAFTING)

    def predict(self, batch: Batch) -> float | None:
        """Returns the expected seconds of the batch's step; None before the first step of its phase."""
        return self._models[batch.phase].predict(self._work_of(batch))

    def observe(self, batch: Batch, seconds: float, experts_read: float | None = None) -> None:
        """Learns that the batch's step took `seconds`, and which share of the experts it read, if that is known."""
        if experts_read is not None:
            self._experts.observe(batch.num_tokens, experts_read)
        self._models[batch.phase].observe(self._work_of(batch, experts_read), seconds)

    def decode_bound(self, requests: Sequence[Request]) -> float:
        """Returns seconds that a decode step of these requests rarely exceeds; 0 before the first decode step."""
        return self._models[Phase.DECODE].bound(self._decode_work(requests))

    def decode_price(self, requests: Sequence[Request]) -> TokenPrice:
        model, num_tokens = self._models[Phase.DECODE], len(requests)
        _, token_s, _, draft_s, experts_s = model.coefficients
        expected = self._experts.expected
        token_s += experts_s * max(0.0, expected(num_tokens + 1) - expected(num_tokens))
        return TokenPrice(model.predict(self._decode_work(requests)) or 0.0, token_s, draft_s)

    def observe_drafting(self, batch: Batch, seconds: float) -> None:
        """Learns that the draft model took `seconds` for all the batch's draft tokens, at one per request and pass, and
        for the tokens that it made up for."""
        spans = [(each.end - each.num_drafts, each.end) for each in batch.requests if each.num_wanted]
        num_passes = max((end - start for start, end in spans), default=0)
        if num_passes:
            contexts = sum(sum(range(start, end)) for start, end in spans)
            num_behind = sum(each.draft_span[1] - each.draft_span[0] - 1 for each in batch.requests if each.draft_span)
            self._drafting.observe((num_passes, batch.num_drafts + num_behind, contexts), seconds)

    @property
    def num_drafting_steps(self) -> int:
        """Number of steps with draft passes that were observed."""
        return self._drafting.num_seen

    def drafting_price(self, requests: Sequence[Request]) -> float:
        """Returns the predicted seconds of one draft pass for these requests; 0 if unknown."""
        return self._drafting.predict(self._decode_work(requests)[:3]) or 0.0

    def predict_decode(self, num_requests: int, num_context_tokens: int) -> float | None:
        """Returns the expected seconds of a decode step with one token of each of so many requests, whose contexts are
        so long together, and which have no recurrent states; None before the first decode step."""
        work = (1, num_requests, num_context_tokens, 0, self._experts.expected(num_requests))
        return self._models[Phase.DECODE].predict(work)

    def prefill_price(self, start: int, num_tokens: int) -> float | None:
        """Returns the expected seconds of a prefill step that computes a request's positions [start, start +
        num_tokens); None before the first prefill step."""
        return self._models[Phase.PREFILL].predict(with_chunk(NO_PREFILL, start, num_tokens, False))

    def prefill_saving(self, num_tokens: int) -> float:
        """Returns the expected seconds that prefill takes less where a request's first `num_tokens` are not computed; 0
        before the first prefill step."""
        whole, empty = self.prefill_price(0, num_tokens), self.prefill_price(0, 0)
        return 0.0 if whole is None or empty is None else max(whole - empty, 0.0)

    def prefill_bound(self, work: Work) -> float:
        """Returns seconds that a prefill step of this work rarely exceeds; infinite for far more work than was observed
        lately."""
        return self._models[Phase.PREFILL].bound(work)

    def _decode_work(self, requests: Sequence[Request]) -> Work:
        """Returns the work of a decode step with one token of each request, whose context is all its tokens so far: the
        step itself, tokens, those that they attend to, how often the states of a request are read and written, and the
        share of the experts that are read."""
        contexts = sum(request.num_tokens for request in requests)
        num_passes = sum(request.state_slot is not None for request in requests)
        return (1, len(requests), contexts, num_passes, self._experts.expected(len(requests)))

    def _work_of(self, batch: Batch, experts_read: float | None = None) -> Work:
        if batch.phase is Phase.DECODE:
            with_states = [request for request in batch.requests if request.state_slot is not None]
            num_passes = len(with_states) + sum(request.num_drafts > 0 for request in with_states)
            contexts = sum(request.end for request in batch.requests)
            share = self._experts.expected(batch.num_tokens) if experts_read is None else experts_read
            return (1, batch.num_tokens, contexts, num_passes, share)
        work = NO_PREFILL
        for request in batch.requests:
            work = with_chunk(work, request.start, len(request.token_ids), request.scores_prompt)
        return work


def with_chunk(work: Work, start: int, num_tokens: int, is_scored: bool) -> Work:
    """The work of a prefill step that also computes one request's positions [start, start + num_tokens)."""
    pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return tuple(map(add, work, (num_tokens, 0, 1, pairs, num_tokens if is_scored else 0)))
