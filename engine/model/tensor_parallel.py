"""Tensor parallelism: a model whose ranks have some columns of every matrix, and some attention heads.

Every output column is one rank's, which multiplies whole rows by it, so no sum is cut and any number of ranks computes
the same bits. In fused layers a rank goes on with the columns that it has: its heads attend over their own part of the
KV cache, and what they and the MLP's gate make is gathered before the next matrix. Elsewhere every product is gathered,
and all ranks compute what lies between the matrices.
"""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from engine.attention.registry import AttentionCall
from engine.checkpoint.stored_tensor import as_stored
from engine.core.errors import ModelError
from engine.model.fused_modules import FusedAttention, FusedMLP
from engine.model.known import causal_lm, code_fingerprint
from engine.weights.gathered_embedding import GatheredEmbedding
from engine.weights.linear import is_linear
from engine.weights.merged_rows import GATE_BLOCK
from engine.weights.moe import is_experts
from engine.weights.partition import Cut, check_num_heads, even_cut, head_parts, starts_of
from engine.weights.rank_group import RankGroup

__all__ = ["check_heads", "check_same_weights", "cut_modules", "leave_weights_stored"]


def check_heads(model: str, calls: Sequence[AttentionCall], group: RankGroup) -> None:
    """Raises ConfigError if there are more ranks than attention heads."""
    check_num_heads(model, min((call.query.shape[1] for call in calls), default=group.size), group.size)


def check_same_weights(model: str, fingerprint: str, group: RankGroup) -> None:
    """Raises ModelError unless all ranks have loaded the same weights; they call it together."""
    if len({*map(tuple, group.values_of_all(int(fingerprint[:12], 16)))}) > 1:
        raise ModelError(f"The checkpoint {model} was changed while it was loaded; start again.")


def leave_weights_stored(module: PreTrainedModel, group: RankGroup) -> None:
    """Has weights stay in the mapped checkpoint, also where layers are fused, until one of several ranks packs its part
    of them. On a GPU they do so from the beginning, or are no checkpoint's."""
    for owner in module.modules() if group.size > 1 else ():
        if is_linear(owner) or is_experts(owner):
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.dim() > 1 and parameter.device.type == "cpu":
                    owner._parameters[name] = nn.Parameter(as_stored(parameter.detach()), requires_grad=False)


def cut_modules(module: PreTrainedModel, group: RankGroup) -> dict[nn.Module, Cut]:
    """Gives fused attention layers this rank's heads, and the embedding its columns; returns the rank's part of the
    linear layers in fused modules, for `prepare_linears`."""
    cuts: dict[nn.Module, Cut] = {}
    if group.size == 1:
        return cuts
    _cut_embedding(module, group)
    for each in module.modules():
        if isinstance(each, FusedAttention) and _can_be_cut(each):
            cuts |= _cut_attention(each, group)
        elif isinstance(each, FusedMLP) and each.is_gated and each.factors.first is None:
            cuts |= _cut_mlp(each, group)
    return cuts


def _can_be_cut(attention: FusedAttention) -> bool:
    has_own_kv = attention.kv.values == "projected" and not attention.kv.lends and attention.factors.first is None
    return has_own_kv and attention.call.params.sinks is None and attention.norms_each_head


def _cut_embedding(module: PreTrainedModel, group: RankGroup) -> None:
    """Other code than that of known decoders may read an embedding's numbers."""
    embedding = module.get_input_embeddings()
    if causal_lm.is_decoder(causal_lm.decoder_of(module)) and code_fingerprint.is_embedding(embedding):
        module.set_input_embeddings(GatheredEmbedding(embedding.weight.detach(), group))


def _cut_attention(attention: FusedAttention, group: RankGroup) -> dict[nn.Module, Cut]:
    size, num_heads, num_kv_heads = attention.head_size, attention.num_heads, attention.num_kv_heads
    parts = head_parts(num_heads, num_kv_heads, group.size)
    own = parts[group.rank]
    # rows of the joined weight: queries, keys, values and gates, head by head
    num_others = num_heads + 2 * num_kv_heads
    kinds = [(0, own.query), (num_heads, own.kv), (num_heads + num_kv_heads, own.kv), (num_others, own.query)]
    rows = tuple(
        slice((before + heads.start) * size, (before + heads.stop) * size)
        for before, heads in kinds[: 3 if attention.gates == "none" else 4]
    )
    starts = [part.query.start * size for part in parts] + [num_heads * size]
    attention.num_heads, attention.num_kv_heads = len(own.query), len(own.kv)
    cut = Cut(rows, attention.qkv_proj.out_features)
    return {attention.qkv_proj: cut} | _gathering(attention.o_proj, starts, group)


def _cut_mlp(mlp: FusedMLP, group: RankGroup) -> dict[nn.Module, Cut]:
    num_columns = mlp.gate_up_proj.out_features
    num_inner = num_columns // 2
    if -(-num_inner // GATE_BLOCK) < group.size:  # too few to be divided: each rank has them all
        return {mlp.gate_up_proj: Cut((slice(None),), num_columns)}
    unit = 4 * GATE_BLOCK if num_inner >= 4 * GATE_BLOCK * group.size else GATE_BLOCK
    starts = starts_of(num_inner, group.size, unit)
    first, end = starts[group.rank], starts[group.rank + 1]
    return {mlp.gate_up_proj: Cut((slice(2 * first, 2 * end),), num_columns)} | _gathering(mlp.down_proj, starts, group)


def _gathering(linear: nn.Linear, input_starts: Sequence[int], group: RankGroup) -> dict[nn.Module, Cut]:
    cut = even_cut(linear.out_features, group, input_starts)
    assert cut is not None, "a layer has more columns than a model has heads"
    return {linear: cut}
