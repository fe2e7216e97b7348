"""A fused decoder layer as two calls into C++, before and after its attention: Python takes hardly any of a step.

`FusedDecoderLayer` is the plain path: both call the same operators in the same order.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.kv_cache import KVCache
from engine.attention.registry import attend
from engine.model.fused_modules import FusedAttention, FusedDecoderLayer, FusedMLP, FusedRMSNorm
from engine.model.mixture import is_known_mixture, kernel_mixture, router_weight
from engine.weights.linear import PackedLinear
from engine.weights.module_replacement import replace_modules
from engine.weights.packed_weight import KernelWeight
from engine.weights.quantized_weight import KernelQuantizedWeight

__all__ = ["KernelDecoderLayer", "kernel_norm", "move_layers_to_kernels"]


def move_layers_to_kernels(model: nn.Module) -> None:
    """Replaces the layers of `model` that were fused in all their parts; their linear layers must be packed."""
    replace_modules(model, _kernel_layer)


class KernelDecoderLayer(nn.Module):
    """Replaces a `FusedDecoderLayer`, which becomes its child and owns the weights."""

    def __init__(self, layer: FusedDecoderLayer) -> None:
        super().__init__()
        self.layer = layer
        attention, classes = cast(FusedAttention, layer.self_attn), torch.classes.twostep
        self._before = classes.BeforeAttention(
            kernel_norm(layer.input_layernorm),
            *(None if norm is None else kernel_norm(norm) for norm in (attention.q_norm, attention.k_norm)),
            _linear(attention.qkv_proj),
            attention.num_heads,
            attention.num_kv_heads,
        )
        self._after = classes.AfterAttention(
            _linear(attention.o_proj), kernel_norm(layer.post_attention_layernorm), *_mlp_or_mixture(layer.mlp)
        )
        self._call = attention.call

    @property
    def index(self) -> int:
        """The layer's index among the attention layers."""
        return self._call.layer

    @property
    def weights_after_attention(self) -> list[KernelWeight | KernelQuantizedWeight]:
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
        position_embeddings: tuple[Tensor, Tensor],  # [1, T, head_size] each
        **_: Any,
    ) -> Tensor:
        query_key_value = torch.ops.twostep.before_attention(self._before, hidden_states, *position_embeddings)
        attended = attend(self._call.with_tensors(*query_key_value))
        return cast(Tensor, torch.ops.twostep.after_attention(self._after, hidden_states, attended))

    def bind(self, cache: KVCache) -> Any:
        """Returns the layer for the C++ decoder, which attends over this layer's part of the cache."""
        return torch.classes.twostep.Layer(
            self._before, self._after, *cache.of_layer(self._call.layer), *self._call.params
        )


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


def _is_known_weight(packed: object) -> bool:
    """Whether the C++ layers support the weight: dense ones, and quantized ones whose rows have 8 bits."""
    return isinstance(packed, KernelWeight) or (isinstance(packed, KernelQuantizedWeight) and packed.row_bits == 8)


def _mlp_or_mixture(mlp: Any) -> tuple[Any | None, Any | None]:
    """Returns the layer's MLP, or its mixture, as the C++ operators take it, and None in the other's place."""
    if not isinstance(mlp, FusedMLP):
        return None, kernel_mixture(mlp)
    return torch.classes.twostep.Mlp(_linear(mlp.gate_up_proj), _linear(mlp.down_proj), mlp.activation), None


def kernel_norm(norm: FusedRMSNorm) -> Any:
    """Returns the norm as the C++ operators take it."""
    return torch.classes.twostep.Norm(norm.weight.detach(), norm.eps)


def _linear(linear: Any) -> Any:
    packed = linear.packed
    return torch.classes.twostep.Linear(packed.packed, linear.bias, linear.out_features, packed.bits)
