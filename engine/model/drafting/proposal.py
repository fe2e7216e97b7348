"""Chooses what proposes draft tokens for a loaded model."""

from typing import cast

from engine.attention import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.model.drafting.kernel_head import HeadParts, KernelHeadForward
from engine.runner.forward import Forward, HeadForward, HeadInput
from engine.runner.head_passes import HeadPasses, HeadRunner
from engine.runner.loaded_model import DraftModel, LoadedModel
from engine.runner.proposer import HeadProposer, ModelProposer, NoProposer, Proposer
from engine.runner.sampler_choice import choose_sampler

__all__ = ["draft_forward", "proposer_of"]


def draft_forward(model: LoadedModel, cache: KVCache, backend: AttentionBackend) -> Forward | HeadPasses | None:
    """Returns the forward pass of the draft model over `cache`, which is that of all layers, or the passes of a head;
    None if there is none."""
    if model.draft is None:
        return None
    own = cache.of_layers(slice(len(model.layers), None)) if model.draft.layers else cache
    if model.draft.join is not None:
        assert cache.hidden is not None
        return HeadPasses(_head_forward(model.draft, model.draft.join, own, backend), cache.hidden)
    from engine.model.forward_choice import choose_forward  # imports transformers, for seconds

    return choose_forward(model.draft.module, own, backend)


def _head_forward(draft: DraftModel, join: HeadInput, cache: KVCache, backend: AttentionBackend) -> HeadForward:
    if isinstance(draft.module, HeadParts):
        return KernelHeadForward(draft.module, cache)
    from engine.model.forward_choice import choose_head_forward

    return choose_head_forward(draft.module, join, cache, backend)


def proposer_of(model: LoadedModel, cache: KVCache, drafting: Forward | HeadRunner | None) -> Proposer:
    """Returns the proposer that runs the draft model by this forward pass, or a head; without one, what proposes
    nothing."""
    if model.draft is None or drafting is None:
        return NoProposer()
    sampler = choose_sampler(model.device, model.has_kernels, model.eos_token_ids)
    if model.draft.join is not None:
        return HeadProposer(cast(HeadRunner, drafting), sampler, cache.block_size, model.device)
    return ModelProposer(cast(Forward, drafting), sampler, cache.block_size, model.device)
