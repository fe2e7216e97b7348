"""Chooses what proposes draft tokens for a loaded model."""

from engine.attention import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.runner.forward import HeadForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.proposer import HeadProposer, ModelProposer, NoProposer, Proposer
from engine.runner.sampler import Sampler

__all__ = ["choose_proposer"]


def choose_proposer(model: LoadedModel, cache: KVCache, backend: AttentionBackend) -> Proposer:
    """Returns the proposer that runs the draft model over `cache`, which is that of all layers; if there is none, one
    that proposes nothing."""
    if model.draft is None:
        return NoProposer()
    from engine.model.forward_choice import choose_forward  # imports transformers' models, for seconds

    own = cache.of_layers(slice(len(model.layers), None)) if model.draft.layers else cache
    sampler = Sampler(model.device, model.has_kernels, model.eos_token_ids)
    if model.draft.join is not None and cache.hidden is not None:
        head = HeadForward(model.draft.module, model.draft.join, own, backend)
        return HeadProposer(head, cache.hidden, sampler, model.device)
    return ModelProposer(choose_forward(model.draft.module, own, backend), sampler, cache.block_size, model.device)
