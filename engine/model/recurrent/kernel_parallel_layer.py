"""Layers that mix tokens recurrently beside their attention as two calls into C++, before and after both.

`FusedParallelLayer` is the plain path: both call the same operators in the same order.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.registry import attend
from engine.model.decoder_parts import AfterParts
from engine.model.kernel_layer import KernelLayer, attention_parts, is_attention_known
from engine.model.known.linears import is_known_linear, is_known_mlp, mlp_parts, parts_of_linear
from engine.model.known.norms import norm_parts
from engine.model.recurrent.parallel_layer import FusedParallelLayer
from engine.model.recurrent.scaled import constant_factors
from engine.weights.adapters import are_rows_adapted
from engine.weights.module_replacement import replace_modules

__all__ = ["KernelParallelLayer", "move_parallel_layers_to_kernels"]


def move_parallel_layers_to_kernels(model: nn.Module) -> None:
    """Replaces the layers of this form whose linear layers are known; these must be packed."""
    replace_modules(model, _kernel_parallel_layer)


class KernelParallelLayer(KernelLayer):
    """Replaces a `FusedParallelLayer`."""

    layer: FusedParallelLayer

    def __init__(self, layer: FusedParallelLayer) -> None:
        super().__init__(layer)
        attention, mamba, classes = layer.self_attn, layer.mamba, torch.classes.twostep
        heads = attention_parts(attention, None, "self_attn").bound()
        rows = parts_of_linear(mamba.in_proj, mamba.factors.first).bound()
        norm = norm_parts(layer.input_layernorm).bound()
        self._run_before = classes.BeforeBoth(norm, heads, layer.attention_factor, rows, mamba.factor).run
        self._rotation, self._call, self._mix = attention.rotation, attention.call, mamba.mix
        self._run_after = classes.AfterBoth(
            AfterParts(
                _scaled(attention.o_proj, layer.attended_factor),
                norm_parts(layer.pre_ff_layernorm),
                mlp_parts(layer.feed_forward),
            ).bound(),
            _scaled(mamba.out_proj, layer.mixed_factor).bound(),
        ).run

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor]:
        if are_rows_adapted():
            return cast(tuple[Tensor], self.layer(hidden_states, position_embeddings=position_embeddings, **kwargs))
        tables = self._rotation.tables_of(position_embeddings, hidden_states)
        query, key, value, rows = self._run_before(hidden_states, *tables)
        mixed = self._mix(rows)
        attended = attend(self._call.with_tensors(query, key, value))
        return (self._run_after(hidden_states, attended, mixed),)


def _scaled(linear: Any, factor: float) -> Any:
    """Returns the parts of a linear layer whose product is multiplied by a factor."""
    return parts_of_linear(linear, None if factor == 1.0 else constant_factors(linear.out_features, factor))


def _kernel_parallel_layer(module: nn.Module) -> nn.Module | None:
    if not isinstance(module, FusedParallelLayer):
        return None
    attention, mamba = module.self_attn, module.mamba
    linears = attention.qkv_proj, attention.o_proj, mamba.in_proj, mamba.out_proj
    are_whole = all(is_known_linear(each) and each.cut is None for each in linears)
    is_known = are_whole and is_attention_known(attention) and is_known_mlp(module.feed_forward)
    return KernelParallelLayer(module) if is_known and module.feed_forward.down_proj.cut is None else None
