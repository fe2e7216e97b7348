"""Fused parts of a decoder layer: fewer and larger matmuls, and one pass over memory for what lies between them.

Each replaces the module of transformers that it is made from, and has that module's interface as far as a decoder layer
uses it. The operators are those of `engine/kernels/layers/fused.cpp`, on CUDA of `engine/kernels/cuda/operators.py`.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from engine.attention.kv_source import OWN_KV, Gates, KVSource, LentKV, head_counts
from engine.attention.registry import AttentionCall, attend
from engine.weights.merged_rows import concatenated, gates_last, heads_by_kind, interleaved, merged_rows, reordered
from engine.weights.segment_sums import SegmentSums

__all__ = [
    "FusedAttention",
    "FusedLayerNorm",
    "FusedMLP",
    "FusedNorm",
    "FusedRMSNorm",
    "FusedRotaryEmbedding",
    "HeadNorms",
    "ProductFactors",
    "QueryScaling",
    "Rotation",
    "names_of_head_layers",
]


class FusedRMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019) as one operator.

    A weight of the rows' dtype multiplies what was rounded to it, as in Llama; one in float32 what was not.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self._ahead: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:  # [..., H] -> [..., H]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        weight = self.weight.float() if x.dtype is torch.float32 else self.weight  # Mamba's residuals are in float32
        return cast(Tensor, torch.ops.twostep.rms_norm(x, weight, self.eps))

    def add_ahead(self, residual: Tensor, x: Tensor | SegmentSums) -> Tensor:
        """Returns residual + x, and keeps the norm of that sum for the next call, if that is of this very tensor."""
        self._ahead = self.add_and_norm(residual, x)
        return self._ahead[0]

    def add_and_norm(self, residual: Tensor, x: Tensor | SegmentSums) -> tuple[Tensor, Tensor]:
        """Returns residual + x, and the norm of that sum."""
        if isinstance(x, SegmentSums):
            sums = torch.ops.twostep.add_segments_rms_norm(residual, *x, self.weight, self.eps)
            return cast("tuple[Tensor, Tensor]", sums)
        return cast("tuple[Tensor, Tensor]", torch.ops.twostep.add_rms_norm(residual, x, self.weight, self.eps))


class FusedLayerNorm(nn.Module):
    """A layer norm (Ba et al., Layer Normalization, 2016) as one operator, rounded once."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, num_heads: int = 1) -> None:
        """`weight` and `bias` are in float32, [H], or [N * D] if each of N heads has its own."""
        super().__init__()
        self.weight, self.bias, self.eps, self.num_heads = weight, bias, eps, num_heads

    def forward(self, x: Tensor) -> Tensor:  # [..., H] -> [..., H], or [..., N, D] -> [..., N, D]
        if self.num_heads > 1:
            heads = x.clone(memory_format=torch.contiguous_format)
            self.norm_heads(heads.view(-1, *heads.shape[-2:]))
            return heads
        return cast(Tensor, torch.ops.twostep.layer_norm(x, self.weight, self.bias, self.eps))

    def add_and_norm(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns residual + x, and the norm of that sum."""
        total = residual + x
        return total, self(total)

    def norm_heads(self, heads: Tensor) -> None:  # [T, N, D]
        """Norms heads in their place."""
        torch.ops.twostep.norm_heads(heads, self.weight, self.bias, self.eps)


FusedNorm = FusedRMSNorm | FusedLayerNorm


class ProductFactors(NamedTuple):
    """What columns of a fused part's first and of its last product are multiplied by, if by anything: float32 [N]."""

    first: Tensor | None = None
    last: Tensor | None = None

    def scale_first(self, product: Tensor) -> Tensor:  # [T, N] -> [T, N]
        """Multiplies a product in its place."""
        return _scaled(product, self.first)

    def scale_last(self, product: Tensor) -> Tensor:
        """Multiplies a product in its place."""
        return _scaled(product, self.last)


def _scaled(product: Tensor, factors: Tensor | None) -> Tensor:
    if factors is not None:
        torch.ops.twostep.scale_columns(product, factors)
    return product


class FusedMLP(nn.Module):
    """A gated MLP: activation(gate) * up, both from one matmul, then the down projection; or one without a gate."""

    factors = ProductFactors()

    def __init__(
        self, mlp: Any, activation: str, names: tuple[str, ...], is_gated: bool, numbers: tuple[float, ...] = ()
    ) -> None:
        """`names` are those of the linear layers of `mlp`: a gate and an up projection, one that is both, or one
        without a gate, and the down projection; `numbers` are those of an activation that has some."""
        super().__init__()
        self.numbers = numbers
        self.activation, self.is_gated = activation, is_gated  # the operator's name for it
        *first, self.down_name = names
        self.names = (*first,)
        """The layers of `mlp` that are one here."""
        linears = [getattr(mlp, name) for name in self.names]
        self.gate_up_proj = _interleaved(*linears) if len(linears) > 1 else linears[0]
        if is_gated and len(linears) == 1:
            _in_turn(self.gate_up_proj)
        self.down_proj = getattr(mlp, self.down_name)
        self.leaves_sum = False
        """Whether what is next takes the last product in segments."""

    def forward(self, x: Tensor) -> Tensor | SegmentSums:  # [..., H] -> [..., H]
        gate_up = self.factors.scale_first(self.gate_up_proj(x.reshape(-1, x.shape[-1])))
        out = _product(self.down_proj, self._activated(gate_up), self.leaves_sum)
        if isinstance(out, SegmentSums):
            return out
        return self.factors.scale_last(out).view(*x.shape[:-1], out.shape[-1])

    def _activated(self, gate_up: Tensor) -> Tensor:
        if self.is_gated:
            return cast(Tensor, torch.ops.twostep.gate(gate_up, self.activation))
        if self.activation in ("square_relu", "gelu_new"):
            getattr(torch.ops.twostep, self.activation)(gate_up)
            return gate_up
        if self.activation == "xielu":
            torch.ops.twostep.xielu(gate_up, *self.numbers)
            return gate_up
        if self.activation == "silu":
            return nn.functional.silu(gate_up)
        return nn.functional.gelu(gate_up, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class QueryScaling(NamedTuple):
    """What queries are multiplied by at each position: 1 + beta * log(1 + n) in the n-th interval of positions."""

    beta: float
    interval: int
    num_positions: int
    shift: int = 0
    """By how many positions less the first interval has."""
    is_wide: bool = False
    """Whether it is a number of float32, whatever the type of queries."""

    def numbers(self, dtype: torch.dtype) -> Tensor:  # [intervals], float32
        """Returns the number of each interval, as it is in a type."""
        which = torch.arange(-(-(self.num_positions + self.shift) // self.interval), dtype=torch.float32)
        if self.is_wide:
            return torch.log1p(which) * self.beta + 1.0
        return (1 + self.beta * torch.log(1 + which)).to(dtype).float()

    def interval_of(self, positions: Tensor) -> Tensor:
        """Returns the number of each position's interval."""
        return (positions + self.shift) // self.interval


class Rotation(NamedTuple):
    """How an attention rotates its queries and keys, and what it does with them then."""

    tables: Literal["whole", "half", "in pairs"] = "whole"
    """How its rotary embedding lays out cosines and sines: in two equal halves, in one of these, or each twice."""
    in_pairs: bool = False
    """Whether columns that are neighbours are rotated together, not those of two halves."""
    is_wide: bool = False
    """Whether it multiplies in float32, and rounds once."""
    is_partial: bool = False
    """Whether tables may be narrower than heads, whose last columns are not rotated then."""
    is_applied: bool = True
    norms_last: bool = False
    """Whether heads are normed after they are rotated, if they are."""
    scaling: QueryScaling | None = None

    def tables_of(self, tables: tuple[Tensor, Tensor] | Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [1, T, rotated columns] in two equal halves, of what the rotary embedding gives for
        these rows [1, T, H]: of both, or of complex numbers."""
        given = (tables.real, tables.imag) if isinstance(tables, Tensor) else tables or (rows, rows)
        cos, sin = (self._table_of(each) for each in given)
        return cos, sin

    def _table_of(self, table: Tensor) -> Tensor:
        if not self.is_applied:
            return table[..., :0]
        half = table[..., ::2] if self.tables == "in pairs" else table
        whole = table if self.tables == "whole" else torch.cat((half, half), -1)
        return whole.float() if self.is_wide else whole


class HeadNorms(NamedTuple):
    """The norms of queries, keys and values, as far as an attention has them."""

    query: FusedNorm | None = None
    key: FusedNorm | None = None
    value: FusedRMSNorm | None = None


class FusedAttention(nn.Module):
    """Attention whose queries, keys and values come from one matmul, are normed if the model does, and then rotated.
    That matmul may have gates, too, whose sigmoids multiply what is attended to, or lack values, or keys, too, which
    are then those of its `kv`."""

    factors = ProductFactors()

    def __init__(
        self,
        attention: Any,
        call: AttentionCall,
        norms: HeadNorms,
        rotation: Rotation,
        kv: KVSource = OWN_KV,
        gates: Gates = "none",
        out_name: str = "o_proj",
    ) -> None:
        """`call` is any call that `attention` made: its shapes and constants are those of all its calls.

        `norms` have one eps and are of one kind, each is of a head or, of queries and keys, of all heads together, or a
        layer norm with numbers for each head. `out_name` is the name of its last layer.
        """
        super().__init__()
        _, self.num_heads, self.head_size = call.query.shape
        self.num_kv_heads, self.gates, self.kv = call.key.shape[1], gates, kv
        self.heads_of_all = self.num_heads, self.num_kv_heads
        """Numbers of heads of queries and of keys on all ranks together."""
        self.names = names_of_head_layers(attention, len(self.head_counts), gates)
        """The layers of `attention` that are one here."""
        self.are_in_turn = self.names == ("query_key_value",)
        """Whether heads of queries, keys and values are in turn in the one layer that has them."""
        linears = [getattr(attention, name) for name in self.names]
        self.qkv_proj = linears[0] if len(linears) == 1 else merged_rows(linears, self.joined)
        if self.are_in_turn:
            reordered(self.qkv_proj, lambda rows: self.joined([rows]))
        self.out_name = out_name
        self.o_proj, self.rotation = getattr(attention, out_name), rotation
        self.q_norm, self.k_norm, self.v_norm = norms
        sinks = call.params.sinks  # of a mapped file, which nothing but a module's parameters may hold
        params = call.params if sinks is None else call.params._replace(sinks=sinks.clone())
        self.call = call._replace(params=params)
        scaling = rotation.scaling
        self._query_scales = None if scaling is None else scaling.numbers(call.query.dtype)
        self.leaves_sum = False
        """Whether what is next takes the last product in segments."""

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Numbers of heads of queries, keys and values, as far as they are projected."""
        return head_counts(self.kv.values, self.num_heads, self.num_kv_heads)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the rows of the projections of `names` as the merged one has them, gates last."""
        if self.are_in_turn:
            return heads_by_kind(tensors, self.head_size)
        return gates_last(tensors, self.head_size) if self.gates == "of queries" else concatenated(tensors)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, H]
        position_embeddings: tuple[Tensor, Tensor] | Tensor | None = None,  # [1, T, columns] each
        position_ids: Tensor | None = None,  # [1, T]
        shared_kv_states: LentKV | None = None,
        **_: Any,
    ) -> tuple[Tensor | SegmentSums, None]:
        tables = self.rotation.tables_of(position_embeddings, hidden_states)
        rows = self.factors.scale_first(self.qkv_proj(hidden_states[0]))
        qkv = rows[:, : sum(self.head_counts) * self.head_size]
        query, key, value = self._heads_of(qkv, tables, self.query_scales_of(position_ids))
        key, value = self.kv.exchanged(key, value, shared_kv_states)
        attended = attend(self.call.with_tensors(query, key, value)).flatten(1)  # [T, num_heads * head_size]
        if self.gates != "none":
            torch.ops.twostep.multiply_by_gates(attended, rows[:, qkv.shape[1] :], "sigmoid")
        out = _product(self.o_proj, attended, self.leaves_sum)
        return out if isinstance(out, SegmentSums) else out[None], None

    def query_scales_of(self, position_ids: Tensor | None) -> Tensor | None:  # [1, T] -> [T], float32
        """Returns what queries at these positions are multiplied by, if that is not one."""
        scaling = self.rotation.scaling
        if self._query_scales is None or scaling is None:
            return None
        assert position_ids is not None, "such an attention is told its positions"
        return self._query_scales[scaling.interval_of(position_ids[0])]

    def _heads_of(
        self, rows: Tensor, tables: tuple[Tensor, Tensor], query_scales: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns queries, keys and values [T, heads, head_size], as far as they are projected."""
        query, *kv = rows.view(len(rows), -1, self.head_size).split_with_sizes([*self.head_counts], dim=1)
        norms = [norm.weight if isinstance(norm, FusedRMSNorm) else None for norm in (self.q_norm, self.k_norm)]
        for norm, heads in zip((self.q_norm, self.k_norm), (query, *kv), strict=False):
            if isinstance(norm, FusedLayerNorm):
                norm.norm_heads(heads)
        if self.kv.values == "of keys":
            value = kv[0].clone() if self.v_norm is None else self.v_norm(kv[0])
            at = self.num_heads * self.head_size
            self._rotate(rows[:, :at], tables, (self.num_heads, 0), (norms[0], None), query_scales)
            self._rotate(rows[:, at:], tables, (self.num_kv_heads, 0), (norms[1], None), None)
            return query, kv[0], value
        self._rotate(rows, tables, (self.num_heads, self.num_kv_heads if kv else 0), norms, query_scales)
        if not kv:
            return query, None, None
        return query, kv[0], kv[1] if self.v_norm is None else self.v_norm(kv[1])

    def _rotate(
        self,
        rows: Tensor,
        tables: tuple[Tensor, Tensor],
        heads: tuple[int, int],
        norms: Sequence[Tensor | None],
        query_scales: Tensor | None,
    ) -> None:
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        form = self.rotation.in_pairs, self.rotation.norms_last
        torch.ops.twostep.rotate_heads(rows, *tables, *heads, *norms, eps, *form, query_scales)

    @property
    def norms_each_head(self) -> bool:
        """Whether no norm is that of all heads of a row together."""
        return self.q_norm is None or self.q_norm.weight.numel() == self.head_size


class FusedRotaryEmbedding(nn.Module):
    """The cosines and sines of rotary embeddings, whose frequencies never change, as one operator."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(embedding.inv_freq.to(torch.float32), persistent=False)
        self.scaling = float(embedding.attention_scaling)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:  # [1, T] -> [1, T, head_size] each
        tables = torch.ops.twostep.rotary_tables(position_ids, self.inv_freq, self.scaling, x.dtype)
        return cast("tuple[Tensor, Tensor]", tables)


def _product(linear: nn.Module, rows: Tensor, in_segments: bool) -> Tensor | SegmentSums:
    """Returns the product of a linear layer, packed or not yet, in segments if that is asked for and it has some."""
    multiply = getattr(linear, "in_segments", linear) if in_segments else linear
    return cast("Tensor | SegmentSums", multiply(rows))


def _interleaved(*linears: nn.Linear) -> nn.Linear:
    """Merges layers into one that has a block of each layer's output columns in turn, as the operator `gate` reads."""
    return merged_rows(linears, interleaved)


def _in_turn(linear: nn.Linear) -> None:
    """Gives a layer whose first half of output columns is the gate the order that the operator `gate` reads."""
    reordered(linear, lambda rows: interleaved(torch.split(rows, len(rows) // 2)))


def names_of_head_layers(attention: nn.Module, num_kinds: int, gates: Gates = "none") -> tuple[str, ...]:
    """Returns the names of the layers that make queries, keys and values, as far as there are so many kinds, and gates,
    or of the one that makes all."""
    for name in ("qkv_proj", "query_key_value"):
        if hasattr(attention, name):
            return (name,)
    return *("q_proj", "k_proj", "v_proj")[:num_kinds], *(("gate_proj",) if gates == "projected" else ())
