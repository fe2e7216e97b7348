"""What proposes the draft tokens of a decode step by a model: nothing, or a draft model.

Drafts that need no model, of texts, predictions and grammars, are proposed by each request's own
`engine.core.draft.Drafter`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.runner.forward import Forward
from engine.runner.model_inputs import build_inputs
from engine.runner.sampler import Sampler
from engine.scheduling.speculation.draft_verification import draft_row, last_row, with_draft_token

__all__ = ["ModelProposer", "NoProposer", "Proposer"]


class Proposer(Protocol):
    """Proposes chains of draft tokens. What it keeps from step to step lies in the KV cache."""

    def observe(self, batch: Batch) -> None:
        """Takes note of a batch that the model has just computed."""

    def draft(self, batch: Batch) -> Batch:
        """Returns the batch, which the model is about to compute, with the draft tokens that its requests want."""


class NoProposer:
    """Proposes nothing: the state where there is no draft model."""

    def observe(self, batch: Batch) -> None:
        pass

    def draft(self, batch: Batch) -> Batch:
        raise AssertionError("draft tokens are wanted of a draft model that was not loaded")


class ModelProposer:
    """Proposes what a draft model samples, one token after the other."""

    def __init__(self, forward: Forward, sampler: Sampler, block_size: int, device: torch.device) -> None:
        """`forward` runs the draft model over blocks of `block_size` tokens."""
        self._forward = forward
        self._sampler = sampler
        self._block_size = block_size
        self._device = device

    def observe(self, batch: Batch) -> None:
        """Computes the draft model's own keys and values of prompts, if it has any."""
        if batch.phase is Phase.PREFILL:
            self._compute_kv([request for request in batch.requests if request.draft_span])

    def draft(self, batch: Batch) -> Batch:
        requests = list(batch.requests)
        self._compute_kv([each for each in requests if each.draft_span and each.num_wanted == 0])
        make_row: Callable[[ScheduledRequest], ScheduledRequest] = draft_row
        while wanting := [index for index, each in enumerate(requests) if each.num_wanted > each.num_drafts]:
            logits = self._logits([make_row(requests[index]) for index in wanting])
            sampled = self._sampler.sample(logits, [last_row(requests[index]) for index in wanting])
            for index, token_id in zip(wanting, sampled, strict=True):
                requests[index] = with_draft_token(requests[index], token_id)
            make_row = last_row
        return replace(batch, requests=tuple(requests))

    def _compute_kv(self, requests: Sequence[ScheduledRequest]) -> None:
        """Computes keys and values in the requests' draft spans."""
        if requests:
            self._logits([draft_row(request) for request in requests])

    def _logits(self, rows: Sequence[ScheduledRequest]) -> Tensor:
        """Returns the draft model's logits after each row's last token, [len(rows), vocab]."""
        last = [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
        return self._forward(build_inputs(rows, self._block_size, self._device), last).logits
