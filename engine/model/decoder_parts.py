"""The parts of a decoder that runs in the kernels as a whole: packed tensors and plain numbers, and nothing of torch's
modules.

Each has a `bound` form, an object of the C++ library (`engine/kernels/layers`), which shares the part's tensors.
"""

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.attention.kv_source import Gates, Values, projected_heads
from engine.attention.metadata import AttentionParams
from engine.weights.kernel_experts import ExpertParts, ExpertStack
from engine.weights.linear_parts import LinearParts
from engine.weights.rank_group import Gather

__all__ = [
    "AfterParts",
    "AttentionParts",
    "DecoderParts",
    "EndParts",
    "LatentParts",
    "LayerInputsParts",
    "LayerParts",
    "MixtureNormsParts",
    "MixtureParts",
    "MlpParts",
    "NormParts",
    "RotaryParts",
    "RouterParts",
]


class NormParts(msgspec.Struct, frozen=True, eq=False):
    """An RMSNorm, or a layer norm."""

    weight: Tensor
    eps: float
    is_centered: bool = False
    """Whether rows lose their mean before, as in a layer norm."""
    bias: Tensor | None = None
    """What a layer norm adds."""

    def bound(self) -> Any:
        return torch.classes.twostep.Norm(self.weight, self.eps, self.is_centered, self.bias)


class AttentionParts(msgspec.Struct, frozen=True, eq=False, tag=True):
    """The attention of one layer, and what comes before it."""

    norm: NormParts | None
    query_norm: NormParts | None
    """Norm of each head of queries, or of all together."""
    key_norm: NormParts | None
    value_norm: NormParts | None
    query_key_value: LinearParts
    """The matrix of queries, keys and values, as far as they are projected, and of gates."""
    num_heads: int
    num_kv_heads: int
    layer: int
    """Index among the attention layers."""
    params: AttentionParams
    in_pairs: bool = False
    """Whether columns that are neighbours are rotated together, not those of two halves."""
    norms_last: bool = False
    """Whether heads are normed after they are rotated."""
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The checkpoint's layers of which `query_key_value` consists."""
    values: Values = "projected"
    """Where values come from; keys are another layer's if they are."""
    heads_of_all: tuple[int, int] = (0, 0)
    """Numbers of heads of queries and of keys on all ranks together."""
    path: str = "self_attn"
    """The attention's path in the checkpoint's layer."""
    are_in_turn: bool = False
    """Whether heads of queries, keys and values are in turn in the checkpoint's layer that has them all."""
    gates: Gates = "none"
    """Where gates of what is attended to come from."""

    @property
    def dtype(self) -> torch.dtype:
        return self.query_key_value.dtype

    @property
    def projected_heads(self) -> tuple[int, ...]:
        """Numbers of heads of which each projection has columns, on all ranks together."""
        return projected_heads(self.values, self.gates, *self.heads_of_all)

    @property
    def head_size(self) -> int:
        return self.query_key_value.num_columns // sum(self.projected_heads)

    def bound(self) -> Any:
        """Returns what runs before attention."""
        norms = map(_bound, (self.norm, self.query_norm, self.key_norm, self.value_norm))
        heads = self.query_key_value.bound(), self.num_heads, self.num_kv_heads
        form = self.values, self.in_pairs, self.norms_last, self.gates != "none"
        return torch.classes.twostep.BeforeAttention(*norms, *heads, *form)


class LatentParts(msgspec.Struct, frozen=True, eq=False, tag=True):
    """The attention of one layer over latents, and what comes before it."""

    norm: NormParts | None
    query_down: LinearParts | None
    """What makes of rows what queries are projected of, if not of the rows themselves."""
    query_norm: NormParts | None
    """Norm of that."""
    query: LinearParts
    latent: LinearParts
    """The matrix of a token's latent and of what all heads rotate."""
    latent_norm: NormParts
    keys: ExpertStack
    """What multiplies the queries of each head."""
    values: ExpertStack
    """What multiplies the sums of latents of each head."""
    layer: int
    """Index among the attention layers."""
    params: AttentionParams
    rotated: Literal["halves", "pairs", "pairs apart"]
    """Which columns are rotated together: those of two halves, or neighbours, which may lie in two halves then."""

    @property
    def dtype(self) -> torch.dtype:
        return self.latent.dtype

    def bound(self) -> Any:
        """Returns what runs before attention, and finishes what is attended to."""
        down = None if self.query_down is None else self.query_down.bound()
        queries = down, _bound(self.query_norm), self.query.bound()
        latents = self.latent.bound(), self.latent_norm.bound(), self.keys.bound(), self.values.bound()
        return torch.classes.twostep.LatentAttention(_bound(self.norm), *queries, *latents, self.rotated)


class MlpParts(msgspec.Struct, frozen=True, eq=False, tag=True):
    """A gated MLP, whose gate and up projection are one matrix, or one without a gate."""

    gate_up: LinearParts
    down: LinearParts
    activation: str
    is_gated: bool = True
    names: tuple[str, ...] = ("gate_proj", "up_proj")
    """The checkpoint's layers of which `gate_up` consists."""
    down_name: str = "down_proj"
    numbers: tuple[float, ...] = ()
    """Numbers of an activation that has some."""

    def bound(self) -> Any:
        linears = self.gate_up.bound(), self.down.bound()
        return torch.classes.twostep.Mlp(*linears, self.activation, self.is_gated, [*self.numbers])


class RouterParts(msgspec.Struct, frozen=True, eq=False):
    """What chooses experts for each row, and weighs them."""

    linear: LinearParts
    top_k: int
    scoring: Literal[
        "softmax", "sigmoid", "rounded sigmoid", "softmax of chosen", "sigmoid of chosen", "sparse mixer"
    ] = "softmax"
    """What scores are of logits, in float32, or in the type of logits if a sigmoid is rounded, as all that follows then
    is. The last three are all that there is to do: the first in the type of the rows if it is not rounded to that, the
    second rounded to it, the third of two experts, in the type of logits."""
    is_wide: bool = False
    """Whether logits are in float32."""
    choice_bias: Tensor | None = None
    """Numbers [E] that are added to scores for the choice alone."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """In how many groups of experts the chosen are: in those whose two best have the largest sums."""
    is_sorted: bool = True
    """Whether the chosen are in the order of their scores, and not in that in which torch finds them."""
    is_normalized: bool = False
    """Whether the chosen scores are divided by their sum, to which `sum_offset` is added, and which is `least_sum` at
    least."""
    sum_offset: float = 0.0
    least_sum: float = 0.0
    factor: float = 1.0
    """What they are multiplied by then."""
    is_rounded: bool = False
    """Whether they are rounded to the type of the rows."""
    of_experts: Tensor | None = None
    """Numbers [E] in float32, by which the weights of each expert are multiplied."""
    margin: float = 0.0
    """By which share of the best logit others may be less that a sparse mixer weighs with it."""

    def bound(self) -> Any:
        choice = self.scoring, self.is_wide, self.choice_bias, self.num_groups, self.num_chosen_groups, self.is_sorted
        weighing = self.is_normalized, self.sum_offset, self.least_sum, self.factor, self.is_rounded
        return torch.classes.twostep.Router(
            self.linear.bound(), self.top_k, *choice, *weighing, self.of_experts, self.margin
        )


class MixtureNormsParts(msgspec.Struct, frozen=True, eq=False):
    """Norms of a mixture's parts. Router and experts read norms of their own of a layer's sum, not the one that the
    MLP beside them reads; what experts and MLP make is normed, too."""

    router: NormParts
    router_factor: float
    """What the router's rows are multiplied by."""
    experts: NormParts
    added: NormParts
    shared: NormParts

    def bound(self) -> Any:
        read = self.router.bound(), self.router_factor, self.experts.bound()
        return torch.classes.twostep.MixtureNorms(*read, self.added.bound(), self.shared.bound())


class MixtureParts(msgspec.Struct, frozen=True, eq=False, tag=True):
    """A router, the experts that it chooses from, and an MLP that all rows have, if there is one."""

    router: RouterParts
    experts: ExpertParts
    shared: MlpParts | None = None
    shared_path: str = ""
    """Path of the shared MLP in the checkpoint."""
    shared_gate: LinearParts | None = None
    """What weighs its rows, by the sigmoid of a number of each."""
    norms: MixtureNormsParts | None = None
    weighs_rows: bool = False
    """Whether weights multiply what experts read, and not what they make."""
    factor: float = 1.0
    """What the sum of experts and that MLP is multiplied by."""
    narrowing: tuple[LinearParts, LinearParts] | None = None
    """What makes the rows that experts read, where these are narrower, and what makes wide ones of theirs."""

    def bound(self) -> Any:
        shared = None if self.shared is None else self.shared.bound()
        gate = None if self.shared_gate is None else self.shared_gate.bound()
        norms = None if self.norms is None else self.norms.bound()
        linears = None if self.narrowing is None else [each.bound() for each in self.narrowing]
        narrowing = None if linears is None else torch.classes.twostep.Narrowing(*linears)
        form = norms, self.weighs_rows, self.factor, narrowing
        return torch.classes.twostep.Mixture(self.router.bound(), self.experts.bound(), shared, gate, *form)


class EndParts(msgspec.Struct, frozen=True, eq=False):
    """What ends a layer, behind its feed-forward part."""

    factor: float
    """What the layer's output is multiplied by."""
    gate: LinearParts | None = None
    """What gates an input of the layer's own, if there is one."""
    projection: LinearParts | None = None
    """What projects it then."""
    norm: NormParts | None = None
    """Norm of what is projected, and added then."""

    def bound(self) -> Any:
        linears = (None if each is None else each.bound() for each in (self.gate, self.projection))
        return torch.classes.twostep.LayerEnd(*linears, _bound(self.norm), self.factor)


class AfterParts(msgspec.Struct, frozen=True, eq=False):
    """What a layer does with what its attention, or what is in its place, makes of tokens."""

    output: LinearParts
    """The last projection of attention."""
    norm: NormParts | None
    feed_forward: MlpParts | MixtureParts
    """An MLP or a mixture of experts, mostly behind a norm."""
    attention_norm: NormParts | None = None
    """Norm of what attention adds to the residual, if there is one."""
    feed_forward_norm: NormParts | None = None
    """Norm of what the MLP or the mixture adds."""
    multiplier: float | None = None
    """What both are multiplied by before they are added."""
    is_parallel: bool = False
    """Whether the MLP reads a norm of the layer's input, as attention does."""
    adds_first: bool = False
    """Whether what both make is added before the residual."""
    end: EndParts | None = None
    output_name: str = "self_attn.o_proj"
    """Path of `output` in the checkpoint's layer."""
    path: str = "mlp"
    """Path of the MLP or the mixture in the checkpoint's layer."""

    def bound(self) -> Any:
        feed_forward = self.feed_forward.bound()
        choice = (feed_forward, None) if isinstance(self.feed_forward, MlpParts) else (None, feed_forward)
        added = map(_bound, (self.attention_norm, self.feed_forward_norm))
        end = None if self.end is None else self.end.bound()
        form = self.multiplier, self.is_parallel, self.adds_first, end
        return torch.classes.twostep.AfterAttention(self.output.bound(), _bound(self.norm), *choice, *added, *form)


class LayerParts(msgspec.Struct, frozen=True, eq=False):
    """One layer: attention, and what comes after it."""

    attention: AttentionParts | LatentParts
    after: AfterParts
    rotation: int = 0
    """Which of the decoder's rotary embeddings the layer takes."""
    source: int | None = None
    """The layer before it whose keys and values it takes, if it has none of its own."""

    def bound(self, cache: KVCache) -> Any:
        """Returns the layer, which attends over its part of the cache."""
        before, after = self.attention.bound(), self.after.bound()
        choice = (before, None) if isinstance(self.attention, AttentionParts) else (None, before)
        part, group = cache.of_layer(self.attention.layer), cache.group_of(self.attention.layer)
        params = self.attention.params
        return torch.classes.twostep.Layer(*choice, after, *part, group, *params, self.rotation, self.source)


class RotaryParts(msgspec.Struct, frozen=True, eq=False):
    """A rotary embedding whose frequencies never change."""

    inv_freq: Tensor  # [up to head_size / 2], float32: the columns behind them are not rotated
    scaling: float
    """Factor of its sines and cosines."""
    is_rounded: bool = True
    """Whether these are rounded to the type of the rows."""
    is_wide: bool = False
    """Whether rows are multiplied by them in float32, and rounded once."""
    is_polar: bool = False
    """Whether they are the parts of complex numbers, whose last bits differ."""
    query_scales: Tensor | None = None  # [N], float32
    """What queries are multiplied by: each number those of `scale_interval` positions."""
    scale_interval: int = 1
    scale_shift: int = 0
    """By how many positions less the first number has."""

    def bound(self) -> Any:
        form, scales = (self.is_rounded, self.is_wide, self.is_polar), (self.scale_interval, self.scale_shift)
        return torch.classes.twostep.Rotation(self.inv_freq, self.scaling, *form, self.query_scales, *scales)


class LayerInputsParts(msgspec.Struct, frozen=True, eq=False):
    """What makes an input of its own for each layer: of the token, and of the row that layers start from."""

    embedding: Tensor  # [vocab_size, layers * size], or packed in blocks
    embedding_scale: float | None
    projection: LinearParts
    projection_scale: float
    norm: NormParts
    """Norm of a layer's part of what is projected and scaled."""
    factor: float
    """What the sum of both is multiplied by."""

    def bound(self) -> Any:
        projected = self.projection.bound(), self.projection_scale, self.norm.bound()
        return torch.classes.twostep.LayerInputs(self.embedding, self.embedding_scale, *projected, self.factor)


class DecoderParts(msgspec.Struct, frozen=True, eq=False):
    """A whole model, from token ids to logits."""

    embedding: Tensor  # [vocab_size, H], or packed in blocks
    rotations: tuple[RotaryParts, ...]
    layers: tuple[LayerParts, ...]
    norm: NormParts
    head: LinearParts
    after_embedding: Gather | None = None
    """What gathers all ranks' columns of the embedding, where this is one rank's part."""
    embedding_scale: float | None = None
    """What the embedding's rows are multiplied by, a number of their type."""
    logits_softcap: float | None = None
    """The cap c of logits, each of which becomes c * tanh(logit / c)."""
    logits_factor: float | None = None
    """What logits are multiplied by."""
    logits_divisor: float | None = None
    """What logits are divided by."""
    layer_inputs: LayerInputsParts | None = None
    hidden_divisor: float | None = None
    """What the head's input is divided by."""
    path: str = "model.layers"
    """Path of the layers in the checkpoint."""

    def bound(self, cache: KVCache) -> Any:
        """Returns what computes the last hidden states."""
        layers = [layer.bound(cache) for layer in self.layers]
        rotations = [each.bound() for each in self.rotations]
        embedding = self.embedding, self.after_embedding, self.embedding_scale
        inputs = None if self.layer_inputs is None else self.layer_inputs.bound()
        return torch.classes.twostep.Decoder(*embedding, inputs, rotations, layers, self.norm.bound())


def _bound(norm: NormParts | None) -> Any:
    return None if norm is None else norm.bound()
