"""Replaces the parts of a model whose code is known by fused modules, where there are kernels for them.

Each part is replaced by itself; parts that are not known stay those of transformers.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from engine.attention.registry import AttentionCall
from engine.model import code_fingerprint
from engine.model.fused_modules import (
    FusedAttention,
    FusedDecoderLayer,
    FusedMLP,
    FusedRMSNorm,
    FusedRotaryEmbedding,
    FusedSandwichLayer,
)
from engine.weights.linear import is_linear
from engine.weights.module_replacement import has_hooks, replace_modules

__all__ = ["fuse_between_layers", "fuse_modules", "fuse_norms"]


def fuse_modules(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    """Swaps modules of `model` in place; `calls` holds one attention call of each layer.

    It must be called before the linear layers are packed, since it merges some of them.
    """
    fuse_norms(model)
    replace_modules(model, _fused_mlp)
    replace_modules(model, lambda module: _fused_attention(module, calls))
    replace_modules(model, _fused_layer)


def fuse_norms(model: PreTrainedModel) -> None:
    """Swaps the norms only: their sums have another order, while the other swaps change no bit of a result."""
    replace_modules(model, lambda module: _fused_norm(module, model.dtype))


def fuse_between_layers(model: PreTrainedModel) -> None:
    """Has each fused layer do the work of the norm behind it, and one operator compute the rotary embeddings of a step.

    It is for CUDA, where each launch has its price; on the CPU whole layers, and whole steps, are one call.
    """
    replace_modules(model, _fused_rotary)
    decoder = cast(Any, model.base_model)
    layers = [*getattr(decoder, "layers", ())]
    norms = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), getattr(decoder, "norm", None)]
    for layer, norm in zip(layers, norms, strict=False):
        if isinstance(layer, FusedDecoderLayer) and isinstance(norm, FusedRMSNorm):
            layer.lead_to(norm)


def _fused_rotary(module: nn.Module) -> nn.Module | None:
    return FusedRotaryEmbedding(module) if code_fingerprint.is_rotary_embedding(module) else None


def _fused_norm(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    """Returns the fused norm, or None for norms of another dtype than the model's, whose results have a third one."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype != dtype:
        return None
    if code_fingerprint.is_rms_norm(module):
        return FusedRMSNorm(cast(nn.Parameter, weight), float(cast(float, module.variance_epsilon)))
    if code_fingerprint.is_unrounded_rms_norm(module):
        return FusedRMSNorm(_fixed(weight.float()), float(cast(float, module.variance_epsilon)))
    if code_fingerprint.is_zero_centered_rms_norm(module):
        return FusedRMSNorm(_fixed(1.0 + weight.float()), float(cast(float, module.eps)))
    return None


def _fixed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def _fused_mlp(module: nn.Module) -> nn.Module | None:
    if not code_fingerprint.is_gated_mlp(module) or not _are_linear(module, "gate_proj", "up_proj", "down_proj"):
        return None
    activation = _activation_name(cast(nn.Module, module.act_fn))
    return None if activation is None else FusedMLP(module, activation)


def _activation_name(module: nn.Module) -> str | None:
    """Returns the operators' name of an activation; None for those that they do not have."""
    if has_hooks(module):
        return None
    if type(module) in (SiLUActivation, nn.SiLU):
        return "silu"
    is_tanh = type(module) is GELUTanh and isinstance(module.act, functools.partial)  # not the formula in Python
    return "gelu_tanh" if is_tanh else None


def _fused_attention(module: nn.Module, calls: Sequence[AttentionCall]) -> nn.Module | None:
    has_norms = code_fingerprint.is_attention_with_norms(module)
    norms = _head_norms(module) if has_norms else None
    if norms is None and (has_norms or not code_fingerprint.is_attention(module)):
        return None
    call = next((call for call in calls if call.layer == module.layer_idx), None)
    return FusedAttention(module, call, norms) if call is not None and _has_shape_of(module, call) else None


def _head_norms(attention: nn.Module) -> tuple[FusedRMSNorm, FusedRMSNorm] | None:
    query, key = attention.q_norm, attention.k_norm
    is_fused = isinstance(query, FusedRMSNorm) and isinstance(key, FusedRMSNorm) and query.eps == key.eps
    return cast("tuple[FusedRMSNorm, FusedRMSNorm]", (query, key)) if is_fused else None


def _has_shape_of(attention: nn.Module, call: AttentionCall) -> bool:
    """Whether all heads have one even size, and the projections have as many output columns as the call's tensors."""
    names = ("q_proj", "k_proj", "v_proj")
    if not _are_linear(attention, *names, "o_proj") or len({part.shape[2] for part in call[:3]}) > 1:
        return False
    sizes = [cast(nn.Linear, getattr(attention, name)).out_features for name in names]
    return call.query.shape[2] % 2 == 0 and sizes == [part[0].numel() for part in call[:3]]


def _fused_layer(module: nn.Module) -> nn.Module | None:
    kind, names = FusedDecoderLayer, ["input_layernorm", "post_attention_layernorm"]
    if code_fingerprint.is_sandwich_layer(module):
        kind, names = FusedSandwichLayer, [*names, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    elif not code_fingerprint.is_decoder_layer(module):
        return None
    return kind(module) if all(isinstance(getattr(module, name), FusedRMSNorm) for name in names) else None


def _are_linear(module: nn.Module, *names: str) -> bool:
    layers = [getattr(module, name) for name in names]
    return all(isinstance(layer, nn.Linear) and is_linear(layer) for layer in layers)
