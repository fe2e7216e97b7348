"""Chooses what proposes draft tokens for a loaded model."""

from engine.attention import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.model.drafting.kernel_head import HeadParts, KernelHeadForward
from engine.runner.forward import Forward, HeadForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.proposer import HeadProposer, ModelProposer, NoProposer, Proposer
from engine.runner.sampler_choice import choose_sampler

__all__ = ["draft_forward", "proposer_of"]


def draft_forward(model: LoadedModel, cache: KVCache, backend: AttentionBackend) -> Forward | HeadForward | None:
    """Returns the forward pass of the draft model over `cache`, which is that of all layers; None if there is none."""
    if model.draft is None:
        return None
    own = cache.of_layers(slice(len(model.layers), None)) if model.draft.layers else cache
    if isinstance(model.draft.module, HeadParts):
        return KernelHeadForward(model.draft.module, own)
    from engine.model.forward_choice import choose_forward, choose_head_forward  # imports transformers, for seconds

    if model.draft.join is not None:
        return choose_head_forward(model.draft.module, model.draft.join, own, backend)
    return choose_forward(model.draft.module, own, backend)


def proposer_of(model: LoadedModel, cache: KVCache, forward: Forward | HeadForward | None) -> Proposer:
    """Returns the proposer that runs the draft model by this forward pass; without one, what proposes nothing."""
    if forward is None:
        return NoProposer()
    sampler = choose_sampler(model.device, model.has_kernels, model.eos_token_ids)
    if isinstance(forward, HeadForward):
        assert cache.hidden is not None
        return HeadProposer(forward, cache.hidden, sampler, model.device)
    return ModelProposer(forward, sampler, cache.block_size, model.device)
