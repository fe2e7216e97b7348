"""What all ranks of a model have together: each counts its own part, and all of them get the sums."""

from dataclasses import dataclass

import msgspec

from engine.attention.kv_cache import KVCache, bytes_per_block
from engine.core.machine import AttentionSize, Ceilings, ModelSize
from engine.mixers.state import StateCache, bytes_per_slot
from engine.runner.loaded_model import LoadedModel
from engine.weights.rank_group import RankGroup

__all__ = ["Totals", "ceilings_of_all", "totals_of"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all ranks of a model."""

    weight_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_request: int
    size: ModelSize
    draft_size: ModelSize | None
    """The draft model's size. One that is no head and has weights of its own is run by the first rank alone."""


def totals_of(model: LoadedModel, cache: KVCache, states: StateCache, group: RankGroup) -> Totals:
    """Returns the sums; all ranks call it together."""
    block_size, per_request = cache.block_size, bytes_per_slot(model.states)
    per_token = -(-bytes_per_block(model.layers, block_size, model.kv_dtype) // block_size)
    own = group.sum(model.weight_bytes, cache.num_bytes, per_token, per_request)
    weight_bytes, cache_bytes, bytes_per_token, state_bytes = map(int, own)
    draft_size = model.draft.size if model.draft else None
    if model.draft is not None and (model.has_head or not model.draft.layers):  # on all ranks
        draft_size = _sum(model.draft.size, group)
    return Totals(weight_bytes, cache_bytes, bytes_per_token, state_bytes, _sum(model.size, group), draft_size)


def ceilings_of_all(own: Ceilings, group: RankGroup) -> Ceilings:
    """Returns the peaks of all ranks, which have measured their own at the same time."""
    read_bytes_per_s, flops_per_s = group.sum(own.read_bytes_per_s, own.flops_per_s)
    return msgspec.structs.replace(own, read_bytes_per_s=read_bytes_per_s, flops_per_s=flops_per_s)


def _sum(size: ModelSize, group: RankGroup) -> ModelSize:
    counts = ("layer_bytes", "layer_flops", "last_flops", "expert_bytes", "head_bytes", "head_flops")
    sums = map(int, group.sum(*(getattr(size, name) for name in counts)))
    attention = tuple(_attention_sum(each, group) for each in size.attention)
    return msgspec.structs.replace(size, **dict(zip(counts, sums, strict=True)), attention=attention)


def _attention_sum(size: AttentionSize, group: RankGroup) -> AttentionSize:
    sums = group.sum(size.bytes_per_token, size.flops_per_pair, size.flops_per_scored_pair)
    return AttentionSize(size.window, *map(int, sums))
