"""What proposes the draft tokens of a decode step by a model: nothing, a draft model, or a head.

Drafts that need no model, of texts, predictions and grammars, are proposed by each request's own
`engine.core.draft.Drafter`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.runner.forward import Forward, ForwardOutput, HiddenOf
from engine.runner.head_passes import HeadRunner, HiddenBefore
from engine.runner.model_inputs import build_inputs, slots_of
from engine.runner.sampler import Sampler
from engine.scheduling.speculation.draft_verification import draft_row, last_row, with_draft_token

__all__ = ["HeadProposer", "ModelProposer", "NoProposer", "Proposer"]


class Proposer(Protocol):
    """Proposes chains of draft tokens. What it keeps from step to step lies in the KV cache."""

    @property
    def hidden_of(self) -> HiddenOf:
        """The model's hidden states that `observe` needs."""

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Takes note of a batch that the model has just computed, and of these hidden states [num_tokens, ...] at all
        positions."""

    def draft(self, batch: Batch) -> Batch:
        """Returns the batch, which the model is about to compute, with the draft tokens that its requests want."""


class NoProposer:
    """Proposes nothing: the state where there is no draft model."""

    hidden_of = None

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        pass

    def draft(self, batch: Batch) -> Batch:
        raise AssertionError("draft tokens are wanted of a draft model that was not loaded")


class _Chain(ABC):
    """Proposes what a model samples that computes KV of its own for prompts, and one draft token after the other."""

    def __init__(self, sampler: Sampler, block_size: int, device: torch.device) -> None:
        self._sampler = sampler
        self._block_size = block_size
        self._device = device

    @abstractmethod
    def _run(self, rows: Sequence[ScheduledRequest], before: Sequence[int] | None) -> ForwardOutput:
        """Computes the rows' tokens, with results at the last one of each. `before` are the results of the last pass
        that these rows follow, if they do."""

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Computes keys and values of prompts, if the model has any of its own."""
        if batch.phase is Phase.PREFILL:
            self._compute_kv([request for request in batch.requests if request.draft_span])

    def draft(self, batch: Batch) -> Batch:
        requests = list(batch.requests)
        self._compute_kv([each for each in requests if each.draft_span and each.num_wanted == 0])
        make_row: Callable[[ScheduledRequest], ScheduledRequest] = draft_row
        wanting = [index for index, each in enumerate(requests) if _wants_more(each)]
        left: list[int] | None = None
        while wanting:
            output = self._run([make_row(requests[index]) for index in wanting], left)
            sampled = self._sampler.sample(output.logits, [last_row(requests[index]) for index in wanting])
            for index, token_id in zip(wanting, sampled, strict=True):
                requests[index] = with_draft_token(requests[index], token_id)
            left = [row for row, index in enumerate(wanting) if _wants_more(requests[index])]
            wanting, make_row = [wanting[row] for row in left], last_row
        return replace(batch, requests=tuple(requests))

    def _compute_kv(self, requests: Sequence[ScheduledRequest]) -> None:
        """Computes keys and values in the requests' draft spans."""
        if requests:
            self._run([draft_row(request) for request in requests], None)


class ModelProposer(_Chain):
    """Proposes what a draft model samples, one token after the other."""

    hidden_of = None

    def __init__(self, forward: Forward, sampler: Sampler, block_size: int, device: torch.device) -> None:
        """`forward` runs the draft model over blocks of `block_size` tokens."""
        super().__init__(sampler, block_size, device)
        self._forward = forward

    def _run(self, rows: Sequence[ScheduledRequest], before: Sequence[int] | None) -> ForwardOutput:
        return self._forward(build_inputs(rows, self._block_size, self._device), _last_of(rows))


class HeadProposer(_Chain):
    """Proposes what a head samples that reads each token together with the hidden state of the one before it: the
    model's, which the KV cache keeps, and from the second draft token on its own (MTP: DeepSeek-V3, 2024; EAGLE-3: Li
    et al. 2025)."""

    def __init__(self, head: HeadRunner, sampler: Sampler, block_size: int, device: torch.device) -> None:
        """`head` runs over blocks of `block_size` tokens."""
        super().__init__(sampler, block_size, device)
        self.hidden_of: HiddenOf = head.hidden_of
        self._head = head

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        assert hidden is not None
        slots = torch.tensor(self._slots(batch.requests, 0), device=self._device)
        self._head.keep(slots, hidden)
        super().observe(batch, hidden)

    def _run(self, rows: Sequence[ScheduledRequest], before: Sequence[int] | None) -> ForwardOutput:
        inputs = build_inputs(rows, self._block_size, self._device)
        states = HiddenBefore(self._slots(rows, 1)) if before is None else HiddenBefore((), before)
        return self._head(inputs, states, _last_of(rows))

    def _slots(self, rows: Sequence[ScheduledRequest], num_before: int) -> list[int]:
        """Returns the slots of the positions `num_before` before those of the rows, [num_tokens]; -1 where that is
        before the first one."""
        ranges = [range(max(0, row.start - num_before), row.end - num_before) for row in rows]
        tables = [row.block_table for row in rows]
        slots = [slots_of([table], [own], self._block_size) for table, own in zip(tables, ranges, strict=True)]
        firsts = [[-1] * (len(row.token_ids) - len(own)) for row, own in zip(rows, slots, strict=True)]
        return [*chain.from_iterable(first + own for first, own in zip(firsts, slots, strict=True))]


def _wants_more(request: ScheduledRequest) -> bool:
    return request.num_wanted > request.num_drafts


def _last_of(rows: Sequence[ScheduledRequest]) -> list[int]:
    """Returns the places of the rows' last tokens in the flat batch."""
    return [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
