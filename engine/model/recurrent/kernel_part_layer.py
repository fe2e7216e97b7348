"""Layers of one part as one call into C++, or as two, before and after what mixes tokens.

`FusedPartLayer` is the plain path: both call the same operators in the same order.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.registry import attend
from engine.model.decoder_parts import MlpParts
from engine.model.fused_modules import FusedAttention, FusedMLP
from engine.model.fused_recurrent import FusedRecurrent
from engine.model.kernel_layer import KernelLayer, attention_parts, is_attention_known
from engine.model.known.linears import is_known_linear, is_known_mlp, mlp_parts, parts_of_linear
from engine.model.known.mixture import is_known_mixture, mixture_parts
from engine.model.known.norms import norm_parts
from engine.model.recurrent.part_layer import FusedPartLayer
from engine.weights.adapters import are_rows_adapted
from engine.weights.module_replacement import replace_modules

__all__ = ["KernelPartLayer", "move_part_layers_to_kernels"]


def move_part_layers_to_kernels(model: nn.Module) -> None:
    """Replaces the layers of one part that were fused in all their parts; their linear layers must be packed."""
    replace_modules(model, _kernel_part_layer)


class KernelPartLayer(KernelLayer):
    """Replaces a `FusedPartLayer`, which becomes its child and owns the weights."""

    layer: FusedPartLayer

    def __init__(self, layer: FusedPartLayer) -> None:
        super().__init__(layer)
        self.block_type, self._read_of = layer.block_type, layer.read_of

    def forward(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Tensor:  # [1, T, H] -> [1, T, H]
        if are_rows_adapted():
            return cast(Tensor, self.layer(hidden_states, **kwargs))
        return self._output(hidden_states, self._read_of(hidden_states, **kwargs))

    def _output(self, hidden_states: Tensor, read: Tensor) -> Tensor:
        """Returns the sum of rows and of what the part makes of other ones, all [1, T, H]."""
        raise NotImplementedError


class KernelRecurrentPart(KernelPartLayer):
    """A layer whose part is recurrent."""

    def __init__(self, layer: FusedPartLayer) -> None:
        super().__init__(layer)
        mixer = cast(FusedRecurrent, layer.part)
        norm, projection = norm_parts(layer.norm_before).bound(), parts_of_linear(mixer.in_proj).bound()
        self._run_before = torch.classes.twostep.NormedLinear(norm, projection).run
        self._mix = mixer.mix
        self._run_after = torch.classes.twostep.AddedLinear(parts_of_linear(mixer.out_proj).bound()).run

    def _output(self, hidden_states: Tensor, read: Tensor) -> Tensor:
        return cast(Tensor, self._run_after(hidden_states, self._mix(self._run_before(read))))


class KernelAttentionPart(KernelPartLayer):
    """A layer whose part is an attention that rotates nothing."""

    def __init__(self, layer: FusedPartLayer) -> None:
        super().__init__(layer)
        attention = cast(FusedAttention, layer.part)
        self._run_before = attention_parts(attention, norm_parts(layer.norm_before), layer.part_name).bound().run
        self._call = attention.call
        self._run_after = torch.classes.twostep.AddedLinear(parts_of_linear(attention.o_proj).bound()).run

    def _output(self, hidden_states: Tensor, read: Tensor) -> Tensor:
        none = read[..., :0]  # columns of angles
        query, key, value, _ = self._run_before(read, none, none, None)
        return cast(Tensor, self._run_after(hidden_states, attend(self._call.with_tensors(query, key, value))))


class KernelFeedForwardPart(KernelPartLayer):
    """A layer whose part is an MLP or a mixture of experts."""

    def __init__(self, layer: FusedPartLayer) -> None:
        super().__init__(layer)
        part = layer.part
        parts = mlp_parts(part) if isinstance(part, FusedMLP) else mixture_parts(part, layer.part_name)
        choice = (parts.bound(), None) if isinstance(parts, MlpParts) else (None, parts.bound())
        norm = norm_parts(layer.norm_before).bound()
        self._run = torch.classes.twostep.AddedFeedForward(norm, *choice).run

    def _output(self, hidden_states: Tensor, read: Tensor) -> Tensor:
        return cast(Tensor, self._run(hidden_states))


def _kernel_part_layer(module: nn.Module) -> nn.Module | None:
    if not isinstance(module, FusedPartLayer):
        return None
    part = module.part
    if isinstance(part, FusedRecurrent):
        are_known = is_known_linear(part.in_proj) and is_known_linear(part.out_proj)
        return KernelRecurrentPart(module) if are_known else None
    if is_attention_known(part):
        return None if part.rotation.is_applied else KernelAttentionPart(module)
    return KernelFeedForwardPart(module) if is_known_mlp(part) or is_known_mixture(part) else None
