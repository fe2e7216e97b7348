"""What a head computes of a text, and drafts behind it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.attention import select_backend
from engine.attention.kv_cache import KVCache
from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.kernels import load_kernels
from engine.mixers.state import StateCache
from engine.model.drafting.proposal import draft_forward, proposer_of
from engine.model.forward_choice import choose_forward
from engine.runner.forward import HeadForward
from engine.runner.head_passes import HeadPasses
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner
from engine.runner.proposer import HeadProposer


class RecordedHead:
    """Runs a head, and appends to `logits` those of all positions of each pass."""

    def __init__(self, forward: HeadForward) -> None:
        self._forward, self.kept_of, self.hidden_of = forward, forward.kept_of, forward.hidden_of
        self.logits: list[Tensor] = []

    def __call__(self, inputs: Any, hidden: Tensor, kept: Sequence[int]) -> Any:
        self.logits.append(self._forward(inputs, hidden, [*range(len(inputs.token_ids))]).logits.clone())
        return self._forward(inputs, hidden, kept)


def head_of(model: LoadedModel) -> tuple[ModelRunner, HeadProposer]:
    """Returns a runner of the model over five blocks of 16 tokens, and the proposer that runs its head."""
    cache = KVCache(model.kv_layers, 5, 16, model.kv_dtype, model.device, model.kept_hidden)
    backend = select_backend(model.device, load_kernels())
    proposer = proposer_of(model, cache, draft_forward(model, cache, backend))
    assert isinstance(proposer, HeadProposer)
    states = StateCache(model.states, 1, model.device)
    return ModelRunner(model, cache, choose_forward(model.module, cache, backend, states), proposer), proposer


def computed_chain(
    model: LoadedModel, text: Sequence[int], num_drafts: int, cuts: Sequence[int] = (19, 20)
) -> tuple[Tensor, list[int]]:
    """Returns the head's logits at each token of the text, which is computed in steps that end at the `cuts`, and the
    greedy draft that follows it."""
    runner, proposer = head_of(model)
    passes = proposer._head
    assert isinstance(passes, HeadPasses)
    recorded = RecordedHead(passes.forward)
    passes.forward = recorded  # type: ignore[assignment]
    params = SamplingParams(max_tokens=20, temperature=0.0)

    def share(start: int, end: int, **fields: Any) -> ScheduledRequest:
        blocks, span = (4, 1, 3, 0, 2), (start, end)
        slot = {"state_slot": 0} if model.states else {}
        return ScheduledRequest(
            "", text[start:end], start, blocks, params, text, [], True, draft_span=span, **fields, **slot
        )

    last = len(text) - 1
    for start, end in pairwise((0, *cuts, last)):
        runner.prefill(Batch(Phase.PREFILL, (share(start, end),)))
    drafted = runner.draft(Batch(Phase.DECODE, (share(last, last + 1, num_wanted=num_drafts),)))
    return torch.cat(recorded.logits)[: len(text)], [*drafted.requests[0].draft]
