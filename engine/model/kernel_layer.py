"""A fused decoder layer as two calls into C++, before and after its attention: Python takes hardly any of a step.

`FusedDecoderLayer` is the plain path: both call the same operators in the same order.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.registry import attend
from engine.model.decoder_parts import AttentionParts, LayerParts, LinearParts, MlpParts, NormParts, linear_parts
from engine.model.fused_modules import (
    FusedAttention,
    FusedDecoderLayer,
    FusedMLP,
    FusedNorm,
    FusedRMSNorm,
    LayerNorms,
    Rotation,
)
from engine.model.known.mixture import is_known_mixture, mixture_parts, router_weight
from engine.weights.adapters import are_rows_adapted
from engine.weights.gathered_weight import own_part
from engine.weights.linear import PackedLinear
from engine.weights.module_replacement import replace_modules
from engine.weights.packed_weight import KernelWeight, PackedWeight
from engine.weights.quantized_weight import KernelQuantizedWeight

__all__ = ["KernelDecoderLayer", "move_layers_to_kernels", "norm_parts"]


def move_layers_to_kernels(model: nn.Module) -> None:
    """Replaces the layers of `model` that were fused in all their parts; their linear layers must be packed."""
    replace_modules(model, _kernel_layer)


class KernelDecoderLayer(nn.Module):
    """Replaces a `FusedDecoderLayer`, which becomes its child and owns the weights."""

    def __init__(self, layer: FusedDecoderLayer) -> None:
        super().__init__()
        self.layer, self.parts = layer, _parts_of(layer)
        self._before, self._after = self.parts.attention.bound(), self.parts.bound_after()
        self._call = cast(FusedAttention, layer.self_attn).call

    @property
    def index(self) -> int:
        """The layer's index among the attention layers."""
        return self._call.layer

    @property
    def rotation(self) -> Rotation:
        return cast(FusedAttention, self.layer.self_attn).rotation

    @property
    def weights_after_attention(self) -> list[PackedWeight]:
        """Packed weights of the output projection and the MLP or router, which keys and values do not depend on."""
        attention_out, mlp = cast(FusedAttention, self.layer.self_attn).o_proj.packed, self.layer.mlp
        if not isinstance(mlp, FusedMLP):
            return [attention_out, router_weight(mlp)]
        return [attention_out, mlp.gate_up_proj.packed, mlp.down_proj.packed]

    @property
    def num_expert_weights(self) -> int:
        """Numbers in the weights of all experts, none for an MLP."""
        return 0 if isinstance(self.layer.mlp, FusedMLP) else cast(int, self.layer.mlp.experts.num_weights)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, H]
        position_embeddings: tuple[Tensor, Tensor],  # [1, T, columns] each
        **_: Any,
    ) -> Tensor:
        if are_rows_adapted():
            return cast(Tensor, self.layer(hidden_states, position_embeddings=position_embeddings))
        tables = self.rotation.tables_of(position_embeddings)
        query_key_value = torch.ops.twostep.before_attention(self._before, hidden_states, *tables)
        attended = attend(self._call.with_tensors(*query_key_value))
        return cast(Tensor, torch.ops.twostep.after_attention(self._after, hidden_states, attended))


def _kernel_layer(module: nn.Module) -> nn.Module | None:
    return KernelDecoderLayer(module) if isinstance(module, FusedDecoderLayer) and _is_known(module) else None


def _is_known(layer: FusedDecoderLayer) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(attention, FusedAttention):
        return False
    linears = [attention.qkv_proj, attention.o_proj]
    if isinstance(mlp, FusedMLP):
        linears += [mlp.gate_up_proj, mlp.down_proj]
    elif not is_known_mixture(mlp):
        return False
    return all(isinstance(linear, PackedLinear) and _is_known_weight(linear.packed) for linear in linears)


def _is_known_weight(packed: PackedWeight) -> bool:
    """Whether the C++ layers support the weight: dense ones, and quantized ones whose rows have 8 bits."""
    own = own_part(packed)
    return isinstance(own, KernelWeight) or (isinstance(own, KernelQuantizedWeight) and own.row_bits == 8)


def _parts_of(layer: FusedDecoderLayer) -> LayerParts:
    attention, mlp = cast(FusedAttention, layer.self_attn), layer.mlp
    norms = LayerNorms(*map(_optional_norm_parts, layer.norms))
    attention_parts = AttentionParts(
        norms.attention,
        _optional_norm_parts(attention.q_norm),
        _optional_norm_parts(attention.k_norm),
        _linear(attention.qkv_proj),
        _linear(attention.o_proj),
        attention.num_heads,
        attention.num_kv_heads,
        attention.call.layer,
        attention.call.params,
        attention.rotation.in_pairs,
        attention.names,
    )
    feed_forward = _mlp(mlp) if isinstance(mlp, FusedMLP) else mixture_parts(mlp)
    added = norms.attended, norms.added, layer.form.multiplier
    return LayerParts(attention_parts, norms.mlp, feed_forward, *added, layer.form.is_parallel)


def _mlp(mlp: FusedMLP) -> MlpParts:
    linears, names = (_linear(mlp.gate_up_proj), _linear(mlp.down_proj)), (mlp.names, mlp.down_name)
    return MlpParts(*linears, mlp.activation, mlp.is_gated, *names)


def norm_parts(norm: FusedNorm) -> NormParts:
    """Returns the parts of a norm."""
    weight = norm.weight.detach()
    if isinstance(norm, FusedRMSNorm):
        return NormParts(weight, norm.eps)
    return NormParts(weight, norm.eps, True, None if norm.bias is None else norm.bias.detach())


def _optional_norm_parts(norm: FusedNorm | None) -> NormParts | None:
    return None if norm is None else norm_parts(norm)


def _linear(linear: Any) -> LinearParts:
    return linear_parts(linear.packed, linear.bias)
