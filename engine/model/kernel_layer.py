"""A fused decoder layer as two calls into C++, before and after what mixes its tokens: Python takes hardly any of a
step.

`FusedDecoderLayer` is the plain path: both call the same operators in the same order.
"""

from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from engine.attention.kv_source import OWN_KV, KVSource, LentKV
from engine.attention.registry import AttentionCall, attend
from engine.model.decoder_parts import (
    AfterParts,
    AttentionParts,
    EndParts,
    LatentParts,
    LayerParts,
    MixtureParts,
    MlpParts,
    NormParts,
)
from engine.model.fused_layer import FusedDecoderLayer, LayerNorms
from engine.model.fused_modules import (
    FusedAttention,
    FusedMLP,
    FusedNorm,
    Rotation,
)
from engine.model.fused_recurrent import FusedRecurrent
from engine.model.known.beside import are_known_beside, mixture_beside_parts, weights_beside
from engine.model.known.latent import is_known_latent_attention, latent_parts, latent_rotation
from engine.model.known.linears import is_known_linear, is_known_mlp, mlp_parts, parts_of_linear, weights_of_mlp
from engine.model.known.mixture import is_known_mixture, mixture_parts, weights_of_all_rows
from engine.model.known.norms import norm_parts
from engine.weights.adapters import are_rows_adapted
from engine.weights.module_replacement import replace_modules
from engine.weights.packed_weight import PackedWeight

__all__ = [
    "KernelDecoderLayer",
    "KernelLatentLayer",
    "KernelLayer",
    "KernelRecurrentLayer",
    "attention_parts",
    "is_attention_known",
    "move_layers_to_kernels",
]


def move_layers_to_kernels(model: nn.Module) -> None:
    """Replaces the layers of `model` that were fused in all their parts; their linear layers must be packed."""
    replace_modules(model, _kernel_layer)


class KernelLayer(nn.Module):
    """Replaces a fused layer, which becomes its child and owns the weights."""

    layer: Any

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class KernelDecoderLayer(KernelLayer):
    """Replaces a `FusedDecoderLayer`."""

    layer: FusedDecoderLayer

    def __init__(self, layer: FusedDecoderLayer) -> None:
        super().__init__(layer)
        attention: Any = layer.mixer
        self.parts = LayerParts(
            self._attention_parts(layer), _after_parts(layer, attention.o_proj, self.name_of_output)
        )
        # Called as operators with an object, torch throws and catches two exceptions.
        self._attention = self.parts.attention.bound()
        self._run_before, self._run_after = self._attention.run, self.parts.after.bound().run
        self._call = self._call_of(attention)
        self._exchanged = self.kv.exchanged

    @property
    def name_of_output(self) -> str:
        """The name of the attention's last layer."""
        return cast(FusedAttention, self.layer.mixer).out_name

    @property
    def index(self) -> int:
        """The layer's index among the attention layers."""
        return self._call.layer

    @property
    def kv(self) -> KVSource:
        return cast(FusedAttention, self.layer.mixer).kv

    @property
    def rotation(self) -> Rotation:
        return cast(FusedAttention, self.layer.mixer).rotation

    @property
    def weights_after_attention(self) -> list[PackedWeight]:
        """Packed weights of the output projection and the MLP, or what is beside experts, which keys and values do not
        depend on."""
        attention_out, mlp = cast(FusedAttention, self.layer.mixer).o_proj.packed, self.layer.ffn
        of_input = [getattr(self.layer, name).packed for name in (self.layer.form.input or ())[:2]]
        further = [*weights_beside(self.layer), *of_input]
        if self.layer.form.shared is not None:
            further += weights_of_mlp(self.layer.shared)
        if not isinstance(mlp, FusedMLP):
            return [attention_out, *weights_of_all_rows(mlp), *further]
        return [attention_out, *weights_of_mlp(mlp), *further]

    @property
    def num_expert_weights(self) -> int:
        """Numbers in the weights of all experts, none for an MLP."""
        mixture: Any = self.layer.ffn
        if self.layer.form.beside is not None:
            return cast(int, getattr(self.layer, self.layer.form.beside.experts).num_weights)
        return 0 if isinstance(mixture, FusedMLP) else cast(int, mixture.experts.num_weights)

    def forward(
        self,
        hidden_states: Tensor,  # [1, T, H]
        layer_input: Tensor | None = None,  # [1, T, N]
        position_embeddings: tuple[Tensor, Tensor] | Tensor | None = None,  # [1, T, columns] each
        position_ids: Tensor | None = None,  # [1, T]
        shared_kv_states: LentKV | None = None,
        **_: Any,
    ) -> Any:
        if are_rows_adapted():
            told = {"position_embeddings": position_embeddings, "position_ids": position_ids, "attention_mask": None}
            return self.layer(hidden_states, layer_input, **told, shared_kv_states=shared_kv_states)
        tables = *self.rotation.tables_of(position_embeddings, hidden_states), self._query_scales_of(position_ids)
        query, key, value, gates = self._run_before(hidden_states, *tables)
        attended = attend(self._call.with_tensors(query, *self._exchanged(key, value, shared_kv_states)))
        output = self._run_after(hidden_states, self._finished(attended), gates, layer_input)
        return self.layer.form.returned(output)

    def _attention_parts(self, layer: FusedDecoderLayer) -> AttentionParts | LatentParts:
        norm = _optional_norm_parts(layer.norms.attention)
        return attention_parts(cast(FusedAttention, layer.mixer), norm, layer.form.mixer)

    def _call_of(self, attention: Any) -> AttentionCall:
        return cast(AttentionCall, attention.call)

    def _query_scales_of(self, position_ids: Tensor | None) -> Tensor | None:
        return cast(FusedAttention, self.layer.mixer).query_scales_of(position_ids)

    def _finished(self, attended: Tensor) -> Tensor:
        """Returns what the output projection multiplies."""
        return attended


class KernelLatentLayer(KernelDecoderLayer):
    """Replaces a `FusedDecoderLayer` whose attention, the model's own code, is over latents."""

    @property
    def name_of_output(self) -> str:
        return "o_proj"

    @property
    def kv(self) -> KVSource:
        return OWN_KV

    @property
    def rotation(self) -> Rotation:
        return latent_rotation(self.layer.mixer)

    @property
    def weights_after_attention(self) -> list[PackedWeight]:
        heads: Any = cast(Any, self.layer.mixer).kv_b_proj
        return [*super().weights_after_attention, *heads.value_weights]

    def _attention_parts(self, layer: FusedDecoderLayer) -> LatentParts:
        return latent_parts(layer.mixer, _optional_norm_parts(layer.norms.attention))

    def _call_of(self, attention: Any) -> AttentionCall:
        """Returns a call without tensors: what all its calls have in common."""
        none, parts = torch.empty(0), self.parts.attention
        return AttentionCall(none, none, none, parts.layer, parts.params, False, True, is_latent=True)

    def _query_scales_of(self, position_ids: Tensor | None) -> None:
        return None

    def _finished(self, attended: Tensor) -> Tensor:
        return cast(Tensor, self._attention.finish(attended))


class KernelRecurrentLayer(KernelLayer):
    """Replaces a `FusedDecoderLayer` whose tokens are mixed by a fused recurrent layer, as `KernelDecoderLayer` does
    others."""

    layer: FusedDecoderLayer

    def __init__(self, layer: FusedDecoderLayer) -> None:
        super().__init__(layer)
        mixer = cast(FusedRecurrent, layer.mixer)
        norm = cast(NormParts, _optional_norm_parts(layer.norms.attention)).bound()
        projection = parts_of_linear(mixer.in_proj).bound()
        self._run_before = torch.classes.twostep.NormedLinear(norm, projection).run
        self._mix = mixer.mix
        self._run_after = _after_parts(layer, mixer.out_proj, "out_proj").bound().run

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:  # [1, T, H] -> [1, T, H]
        if are_rows_adapted():
            return self.layer(hidden_states, **kwargs)
        output = self._run_after(hidden_states, self._mix(self._run_before(hidden_states)), None, None)
        return self.layer.form.returned(output)


def _kernel_layer(module: nn.Module) -> nn.Module | None:
    if not isinstance(module, FusedDecoderLayer) or not _is_feed_forward_known(module):
        return None
    if _is_recurrence_known(module):
        return KernelRecurrentLayer(module)
    if is_known_latent_attention(module.mixer):
        return KernelLatentLayer(module)
    return KernelDecoderLayer(module) if is_attention_known(module.mixer) else None


def _is_feed_forward_known(layer: FusedDecoderLayer) -> bool:
    if not are_known_beside(layer) or not (layer.form.shared is None or is_known_mlp(layer.shared)):
        return False
    is_input_known = all(is_known_linear(getattr(layer, name)) for name in (layer.form.input or ())[:2])
    is_mlp_known = layer.form.shared is None and is_known_mlp(layer.ffn)
    return is_input_known and (is_mlp_known or is_known_mixture(layer.ffn))


def _is_recurrence_known(layer: FusedDecoderLayer) -> bool:
    mixer = layer.mixer
    is_known = isinstance(mixer, FusedRecurrent) and layer.norms.attention is not None
    return is_known and is_known_linear(mixer.in_proj) and is_known_linear(mixer.out_proj)


def is_attention_known(attention: nn.Module) -> bool:
    """Whether the module is a fused attention whose linear layers are known."""
    is_known = isinstance(attention, FusedAttention) and is_known_linear(attention.qkv_proj)
    return is_known and is_known_linear(attention.o_proj)


def attention_parts(attention: FusedAttention, norm: NormParts | None, path: str) -> AttentionParts:
    """Returns the parts of a known attention behind a norm, whose path in the checkpoint's layer is `path`."""
    return AttentionParts(
        norm,
        _optional_norm_parts(attention.q_norm),
        _optional_norm_parts(attention.k_norm),
        _optional_norm_parts(attention.v_norm),
        parts_of_linear(attention.qkv_proj, attention.factors.first),
        attention.num_heads,
        attention.num_kv_heads,
        attention.call.layer,
        attention.call.params,
        attention.rotation.in_pairs,
        attention.rotation.norms_last,
        attention.names,
        attention.kv.values,
        attention.heads_of_all,
        path,
        attention.are_in_turn,
        attention.gates,
    )


def _after_parts(layer: FusedDecoderLayer, output: nn.Module, name: str) -> AfterParts:
    """Returns the parts behind the layer's mixer, whose last projection is `output`, of this name."""
    norms, form = LayerNorms(*map(_optional_norm_parts, layer.norms)), layer.form
    added = norms.attended, norms.added, form.multiplier, form.is_parallel, form.adds_first, _end_parts(layer)
    names = f"{form.mixer}.{name}", form.ffn
    return AfterParts(parts_of_linear(output), norms.mlp, _feed_forward_parts(layer), *added, *names)


def _feed_forward_parts(layer: FusedDecoderLayer) -> MlpParts | MixtureParts:
    if layer.form.beside is not None:
        return mixture_beside_parts(layer)
    if isinstance(layer.ffn, FusedMLP):
        return mlp_parts(layer.ffn)
    mixture, name = mixture_parts(layer.ffn, layer.form.ffn), layer.form.shared
    return (
        mixture if name is None else msgspec.structs.replace(mixture, shared=mlp_parts(layer.shared), shared_path=name)
    )


def _end_parts(layer: FusedDecoderLayer) -> EndParts | None:
    form = layer.form
    if form.input is None:
        return None if form.factor == 1.0 else EndParts(form.factor)
    gate, projection, norm = (getattr(layer, name) for name in form.input)
    return EndParts(form.factor, parts_of_linear(gate), parts_of_linear(projection), norm_parts(norm))


def _optional_norm_parts(norm: FusedNorm | None) -> NormParts | None:
    return None if norm is None else norm_parts(norm)
