"""What proposes the draft tokens of a decode step by a model: nothing, a draft model, or a head.

Drafts that need no model, of texts, predictions and grammars, are proposed by each request's own
`engine.core.draft.Drafter`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.runner.forward import Forward, ForwardOutput, HeadForward, HiddenOf
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
    def _run(self, rows: Sequence[ScheduledRequest], before: Tensor | None) -> ForwardOutput:
        """Computes the rows' tokens, with results at the last one of each. `before` are the hidden states
        [len(rows), hidden_size] that the last pass computed, if these rows follow them."""

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Computes keys and values of prompts, if the model has any of its own."""
        if batch.phase is Phase.PREFILL:
            self._compute_kv([request for request in batch.requests if request.draft_span])

    def draft(self, batch: Batch) -> Batch:
        requests = list(batch.requests)
        self._compute_kv([each for each in requests if each.draft_span and each.num_wanted == 0])
        make_row: Callable[[ScheduledRequest], ScheduledRequest] = draft_row
        wanting, before = [index for index, each in enumerate(requests) if _wants_more(each)], None
        while wanting:
            output = self._run([make_row(requests[index]) for index in wanting], before)
            sampled = self._sampler.sample(output.logits, [last_row(requests[index]) for index in wanting])
            for index, token_id in zip(wanting, sampled, strict=True):
                requests[index] = with_draft_token(requests[index], token_id)
            left = [row for row, index in enumerate(wanting) if _wants_more(requests[index])]
            before = output.hidden.index_select(0, torch.tensor(left, dtype=torch.int64, device=self._device))
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

    def _run(self, rows: Sequence[ScheduledRequest], before: Tensor | None) -> ForwardOutput:
        return self._forward(build_inputs(rows, self._block_size, self._device), _last_of(rows))


class HeadProposer(_Chain):
    """Proposes what a head samples that reads each token together with the hidden state of the one before it: the
    model's, which the KV cache keeps, and from the second draft token on its own (MTP: DeepSeek-V3, 2024; EAGLE-3: Li
    et al. 2025).

    Rows are taken and put by `index_select` and `index_copy_`: indexing by a tensor waits for all of torch's threads,
    which takes milliseconds where their cores have other work.
    """

    def __init__(self, forward: HeadForward, hidden: Tensor, sampler: Sampler, device: torch.device) -> None:
        """`hidden` [num_blocks, block_size, hidden_size] has the place in which the model's hidden states are kept."""
        super().__init__(sampler, hidden.shape[1], device)
        self.hidden_of: HiddenOf = forward.hidden_of
        self._forward = forward
        self._hidden = hidden.flatten(0, 1)

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        assert hidden is not None
        self._hidden.index_copy_(0, self._slots(batch.requests, 0), self._forward.kept_of(hidden))
        super().observe(batch, hidden)

    def _run(self, rows: Sequence[ScheduledRequest], before: Tensor | None) -> ForwardOutput:
        inputs = build_inputs(rows, self._block_size, self._device)
        return self._forward(inputs, self._before(rows) if before is None else before, _last_of(rows))

    def _before(self, rows: Sequence[ScheduledRequest]) -> Tensor:
        """Returns the model's hidden states of the tokens before those of the rows; zeros before the first one."""
        hidden = self._hidden.index_select(0, self._slots(rows, 1))  # of position -1: anything
        if any(row.start == 0 for row in rows):
            starts = accumulate((len(row.token_ids) for row in rows), initial=0)
            hidden[[at for at, row in zip(starts, rows, strict=False) if row.start == 0]] = 0.0
        return hidden

    def _slots(self, rows: Sequence[ScheduledRequest], num_before: int) -> Tensor:
        """Returns the slots of the positions `num_before` before those of the rows, [num_tokens]."""
        ranges = [range(row.start - num_before, row.end - num_before) for row in rows]
        slots = slots_of([row.block_table for row in rows], ranges, self._block_size)
        return torch.tensor(slots, device=self._device)


def _wants_more(request: ScheduledRequest) -> bool:
    return request.num_wanted > request.num_drafts


def _last_of(rows: Sequence[ScheduledRequest]) -> list[int]:
    """Returns the places of the rows' last tokens in the flat batch."""
    return [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
