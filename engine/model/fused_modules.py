"""Fused parts of a decoder layer: fewer and larger matmuls, and one pass over memory for what lies between them.

Each replaces the module of transformers that it is made from, and has that module's interface as far as a decoder layer
uses it. The operators are those of `engine/kernels/layers/fused.cpp`, on CUDA of `engine/kernels/cuda/operators.py`.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.registry import AttentionCall, attend
from engine.weights.segment_sums import SegmentSums

GATE_BLOCK = 16  # columns, as in engine/kernels/base/operators.h

__all__ = [
    "GATE_BLOCK",
    "FusedAttention",
    "FusedDecoderLayer",
    "FusedMLP",
    "FusedRMSNorm",
    "FusedRotaryEmbedding",
    "FusedSandwichLayer",
    "concatenated",
    "interleaved",
    "whole_tables",
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
        return cast(Tensor, torch.ops.twostep.rms_norm(x, self.weight, self.eps))

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


class FusedMLP(nn.Module):
    """A gated MLP: activation(gate) * up, both from one matmul, then the down projection."""

    def __init__(self, mlp: Any, activation: str) -> None:
        super().__init__()
        self.gate_up_proj = _interleaved(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.activation = activation  # the operator's name for it
        self.leaves_sum = False
        """Whether what is next takes the last product in segments."""

    def forward(self, x: Tensor) -> Tensor | SegmentSums:  # [..., H] -> [..., H]
        gate_up = self.gate_up_proj(x.reshape(-1, x.shape[-1]))
        out = _product(self.down_proj, torch.ops.twostep.gate(gate_up, self.activation), self.leaves_sum)
        return out if isinstance(out, SegmentSums) else out.view(*x.shape[:-1], out.shape[-1])


class FusedAttention(nn.Module):
    """Attention whose queries, keys and values come from one matmul, are normed if the model does, and then rotated."""

    def __init__(self, attention: Any, call: AttentionCall, norms: tuple[FusedRMSNorm, FusedRMSNorm] | None) -> None:
        """`call` is any call that `attention` made: its shapes and constants are those of all its calls.

        `norms` are those of queries and of keys, with one eps.
        """
        super().__init__()
        self.qkv_proj = _concatenated(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.q_norm: FusedRMSNorm | None
        self.k_norm: FusedRMSNorm | None
        self.q_norm, self.k_norm = (None, None) if norms is None else norms
        sinks = call.params.sinks  # of a mapped file, which nothing but a module's parameters may hold
        params = call.params if sinks is None else call.params._replace(sinks=sinks.clone())
        self.call = call._replace(params=params)
        _, self.num_heads, self.head_size = call.query.shape
        self.num_kv_heads = call.key.shape[1]
        self.leaves_sum = False
        """Whether what is next takes the last product in segments."""

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, H]
        position_embeddings: tuple[Tensor, Tensor],  # [1, T, head_size] each, or half of that
        **_: Any,
    ) -> tuple[Tensor | SegmentSums, None]:
        qkv = self.qkv_proj(hidden_states[0])
        self._rotate(qkv, *whole_tables(position_embeddings, self.head_size))
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        query, key, value = qkv.view(len(qkv), -1, self.head_size).split(sizes, dim=1)
        attended = attend(self.call.with_tensors(query, key, value))  # [T, num_heads, head_size]
        out = _product(self.o_proj, attended.flatten(1), self.leaves_sum)
        return out if isinstance(out, SegmentSums) else out[None], None

    def _rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        norms = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        torch.ops.twostep.rotate_heads(qkv, cos, sin, self.num_heads, self.num_kv_heads, *norms, eps)


class FusedDecoderLayer(nn.Module):
    """A decoder layer: attention and MLP, each after a norm, with residuals whose sum and norm are one pass."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.next_norm: FusedRMSNorm | None = None

    def lead_to(self, norm: FusedRMSNorm) -> None:
        """Has the layer do the work of the norm that is next to read what it returns along with its last sum, and add
        the segments of products along with the sums behind them."""
        self.next_norm = norm
        for part in (self.self_attn, self.mlp):
            if isinstance(part, FusedAttention | FusedMLP):
                part.leaves_sum = True

    @property
    def mlp_norm(self) -> FusedRMSNorm:
        """The norm of what the MLP reads."""
        return cast(FusedRMSNorm, self.post_attention_layernorm)

    @property
    def added_norms(self) -> tuple[FusedRMSNorm | None, FusedRMSNorm | None]:
        """The norms of what attention and the MLP add to the residual, if there are any."""
        return None, None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # [1, T, H] -> [1, T, H]
        norm_attended, norm_out = self.added_norms
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        attended = attended if norm_attended is None else norm_attended(attended)
        residual, normed = self.mlp_norm.add_and_norm(hidden_states, attended)
        out = self.mlp(normed)
        out = out[0] if type(out) is tuple else out  # gpt-oss returns a router's scores, too
        out = out if norm_out is None else norm_out(out)
        return cast(Tensor, residual + out) if self.next_norm is None else self.next_norm.add_ahead(residual, out)


class FusedSandwichLayer(FusedDecoderLayer):
    """A decoder layer that norms what attention and MLP read, and what they add, as Gemma 2 does."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.pre_feedforward_layernorm = layer.pre_feedforward_layernorm
        self.post_feedforward_layernorm = layer.post_feedforward_layernorm

    def lead_to(self, norm: FusedRMSNorm) -> None:
        """Has the layer do the work of the norm that is next; products are whole, since norms read them."""
        self.next_norm = norm

    @property
    def mlp_norm(self) -> FusedRMSNorm:
        return cast(FusedRMSNorm, self.pre_feedforward_layernorm)

    @property
    def added_norms(self) -> tuple[FusedRMSNorm, FusedRMSNorm]:
        return self.post_attention_layernorm, self.post_feedforward_layernorm


class FusedRotaryEmbedding(nn.Module):
    """The cosines and sines of rotary embeddings, whose frequencies never change, as one operator."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(embedding.inv_freq.to(torch.float32), persistent=False)
        self.scaling = float(embedding.attention_scaling)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:  # [1, T] -> [1, T, head_size] each
        tables = torch.ops.twostep.rotary_tables(position_ids, self.inv_freq, self.scaling, x.dtype)
        return cast("tuple[Tensor, Tensor]", tables)


def whole_tables(tables: tuple[Tensor, Tensor], head_size: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [1, T, head_size], of tables that may have one of two equal halves, as gpt-oss's."""
    cos, sin = tables
    if 2 * cos.shape[-1] != head_size:
        return tables
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _product(linear: nn.Module, rows: Tensor, in_segments: bool) -> Tensor | SegmentSums:
    """Returns the product of a linear layer, packed or not yet, in segments if that is asked for and it has some."""
    multiply = getattr(linear, "in_segments", linear) if in_segments else linear
    return cast("Tensor | SegmentSums", multiply(rows))


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all tensors, those of the first one first: the order of a merged query, key and value."""
    return torch.cat([*tensors])


def interleaved(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a block of each tensor's rows in turn: the order of a merged gate and up projection."""
    blocks = zip(*(torch.split(tensor, GATE_BLOCK) for tensor in tensors), strict=True)
    return torch.cat([*chain.from_iterable(blocks)])


def _concatenated(*linears: nn.Linear) -> nn.Linear:
    """Merges layers into one that has the output columns of all, those of the first one first."""
    return _merged(linears, concatenated)


def _interleaved(*linears: nn.Linear) -> nn.Linear:
    """Merges layers into one that has a block of each layer's output columns in turn, as the operator `gate` reads."""
    return _merged(linears, interleaved)


def _merged(linears: Sequence[nn.Linear], join: Callable[[list[Any]], Tensor]) -> nn.Linear:
    """Merges the layers into the first one; all others lose their weights."""
    first = linears[0]
    if any(linear.bias is not None for linear in linears):
        first.bias = nn.Parameter(join([_bias_of(linear) for linear in linears]), requires_grad=False)
    weights = [linear._parameters.pop("weight") for linear in linears]
    first.weight = nn.Parameter(join(weights), requires_grad=False)
    first.out_features = len(first.weight)
    return first


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
