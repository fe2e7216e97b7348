"""Replaces the parts of a model whose code is known by fused modules, where there are kernels for them.

Each part is replaced by itself; parts that are not known stay those of transformers.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import (
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    ReLUSquaredActivation,
    SiLUActivation,
    XIELUActivation,
)

from engine.attention.kv_source import OWN_KV, head_counts, projected_heads
from engine.attention.registry import AttentionCall
from engine.model.fused_layer import FusedDecoderLayer, LayerForm, LayerInput
from engine.model.fused_modules import (
    FusedAttention,
    FusedLayerNorm,
    FusedMLP,
    FusedNorm,
    FusedRMSNorm,
    FusedRotaryEmbedding,
    HeadNorms,
    Rotation,
    names_of_head_layers,
)
from engine.model.fused_recurrent import FusedDeltaNet, FusedMamba2, FusedShortConvolution, names_of_projections
from engine.model.known import causal_lm, code_fingerprint
from engine.model.known.kv_sources import has_own_keys, kv_source_of, norms_values
from engine.model.known.layer_form import form_of_layer
from engine.model.known.norms import norm_without_weight
from engine.model.known.recurrent import is_delta_net, is_mamba2, is_scaled_mamba2, is_short_convolution
from engine.model.known.rotations import rotation_of
from engine.model.recurrent.parallel_layer import fused_parallel_layer
from engine.model.recurrent.part_layer import fused_part_layer
from engine.model.recurrent.scaled import scaled_attention, scaled_mamba2, scaled_mlp
from engine.weights.linear import is_linear
from engine.weights.module_replacement import has_hooks, replace_modules

__all__ = ["fuse_between_layers", "fuse_modules", "fuse_norms", "fuse_rms_norms", "xielu_numbers"]


def fuse_modules(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    """Swaps modules of `model` in place; `calls` holds one attention call of each layer.

    It must be called before the linear layers are packed, since it merges some of them.
    """
    on_cpu = model.device.type == "cpu"
    fuse_norms(model)
    replace_modules(model, lambda module: _fused_mlp(module, on_cpu))
    replace_modules(model, lambda module: _fused_attention(module, calls, on_cpu))
    if on_cpu:
        replace_modules(model, _fused_recurrent)
    replace_modules(model, lambda module: _fused_layer(module, on_cpu))
    if on_cpu:
        replace_modules(model, fused_part_layer)
        replace_modules(model, fused_parallel_layer)


def fuse_norms(model: PreTrainedModel) -> None:
    """Swaps the norms only: their sums have another order, while the other swaps change no bit of a result."""
    fuse_rms_norms(model, model.dtype)
    if model.device.type == "cpu" and causal_lm.is_decoder(causal_lm.decoder_of(model)):
        replace_modules(model, lambda module: _fused_layer_norm(module, model.dtype))
        for module in model.modules():
            _fuse_norm_without_weight(module)


def fuse_rms_norms(module: nn.Module, dtype: torch.dtype) -> None:
    """Swaps the RMSNorms of this type."""
    replace_modules(module, lambda each: _fused_norm(each, dtype))


def fuse_between_layers(model: PreTrainedModel) -> None:
    """Has each fused layer do the work of the norm behind it, and one operator compute the rotary embeddings of a step.

    It is for CUDA, where each launch has its price; on the CPU whole layers, and whole steps, are one call.
    """
    replace_modules(model, _fused_rotary)
    decoder = cast(Any, causal_lm.decoder_of(model))
    layers = [*getattr(decoder, "layers", ())]
    norms = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), getattr(decoder, "norm", None)]
    for layer, norm in zip(layers, norms, strict=False):
        if isinstance(layer, FusedDecoderLayer) and isinstance(norm, FusedRMSNorm):
            layer.lead_to(norm)


def _fused_rotary(module: nn.Module) -> nn.Module | None:
    has_tables = code_fingerprint.is_rotary_embedding(module) and not code_fingerprint.stays_wide(module)
    return FusedRotaryEmbedding(module) if has_tables else None


def _fused_norm(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    """Returns the fused norm, or None for norms of another dtype than the model's, whose results have a third one."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    if code_fingerprint.is_unrounded_rms_norm(module):  # its result has the type of the rows
        return FusedRMSNorm(_fixed(weight.float()), float(cast(float, module.variance_epsilon)))
    if weight.dtype != dtype:
        return None
    if code_fingerprint.is_rms_norm(module):
        return FusedRMSNorm(cast(nn.Parameter, weight), float(cast(float, module.variance_epsilon)))
    if code_fingerprint.is_rounding_rms_norm(module):
        return FusedRMSNorm(cast(nn.Parameter, weight), float(cast(float, module.eps)))
    if code_fingerprint.is_scaling_rms_norm(module):
        return FusedRMSNorm(_fixed(weight.float()), float(cast(float, module.eps)))
    if code_fingerprint.is_zero_centered_rms_norm(module):
        return FusedRMSNorm(_fixed(1.0 + weight.float()), float(cast(float, module.eps)))
    return None


def _fuse_norm_without_weight(owner: nn.Module) -> None:
    """Replaces a norm that has no weight by one whose numbers are 1: of which size it is, its owner knows."""
    name, size = norm_without_weight(owner)
    norm: Any = owner._modules.get(name)
    if norm is not None and code_fingerprint.is_plain_rms_norm(norm):
        setattr(owner, name, FusedRMSNorm(_fixed(torch.ones(size)), float(norm.eps)))


def _fused_layer_norm(module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    if code_fingerprint.is_plain_layer_norm(module):
        return FusedLayerNorm(_fixed(torch.ones(cast(Any, module).normalized_shape)), None, 1e-5)
    has_bias = code_fingerprint.is_layer_norm(module) or code_fingerprint.is_zero_centered_layer_norm(module)
    if not has_bias and not code_fingerprint.is_unbiased_layer_norm(module):
        return None
    weight: Tensor = cast(Any, module).weight
    bias: Tensor | None = cast(Any, module).bias if has_bias else None
    if weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None
    eps = float(cast(float, module.eps if has_bias else module.variance_epsilon))
    if code_fingerprint.is_zero_centered_layer_norm(module):
        weight = weight + 1.0
    num_heads = weight.shape[0] if weight.dim() > 1 else 1
    return FusedLayerNorm(
        _fixed(weight.float().flatten()), None if bias is None else _fixed(bias.float()), eps, num_heads
    )


def _fixed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def _fused_mlp(module: nn.Module, on_cpu: bool) -> nn.Module | None:
    names = _names_of_mlp(module, on_cpu)
    if names is None or not _are_linear(module, *names[:-1]):
        return None
    is_gated = not code_fingerprint.is_plain_mlp(module)
    act = getattr(module, names[-1]) if names[-1] else None
    activation = "silu" if act is None else _activation_name(act)
    if is_gated and activation not in ("silu", "gelu_tanh"):  # there is no such gate
        return None
    numbers = xielu_numbers(act) if activation == "xielu" else ()
    if activation is None:
        return None
    return scaled_mlp(FusedMLP(module, activation, names[:-1], is_gated, numbers), module)


def xielu_numbers(act: Any) -> tuple[float, ...]:
    """Returns an xIELU's factors of what is positive and of what is negative, its slope and its bound of the latter, as
    they are in its type."""
    positive, negative = (nn.functional.softplus(each) for each in (act.alpha_p, act.alpha_n))
    return tuple(float(each) for each in (positive, act.beta + negative, act.beta, act.eps))


def _fused_recurrent(module: nn.Module) -> nn.Module | None:
    if is_delta_net(module) and _are_linear(module, *names_of_projections(module), "out_proj"):
        return FusedDeltaNet(module)
    if is_short_convolution(module) and _are_linear(module, "in_proj", "out_proj"):
        return FusedShortConvolution(module)
    if is_mamba2(module) and _are_linear(module, "in_proj", "out_proj"):
        return scaled_mamba2(module) if is_scaled_mamba2(module) else FusedMamba2(module)
    return None


_NAMES_OF_PLAIN_MLPS = (
    *(("c_fc", "c_proj", "act"), ("up_proj", "down_proj", "act_fn")),
    *(("dense_h_to_4h", "dense_4h_to_h", "act"), ("fc1", "fc2", "activation_fn")),
)


def _names_of_mlp(module: nn.Module, on_cpu: bool) -> tuple[str, ...] | None:
    """Returns the names of a known MLP's linear layers and its activation, which is empty where it is always silu."""
    if code_fingerprint.is_plain_mlp(module):
        return next(names for names in _NAMES_OF_PLAIN_MLPS if hasattr(module, names[0])) if on_cpu else None
    if code_fingerprint.is_silu_mlp(module):
        return "w1", "w3", "w2", ""
    if not code_fingerprint.is_gated_mlp(module):
        return None
    if hasattr(module, "input_linear"):
        return ("input_linear", "output_linear", "activation") if on_cpu else None
    if hasattr(module, "gate_up_proj"):
        return ("gate_up_proj", "down_proj", "activation_fn") if on_cpu else None
    return "gate_proj", "up_proj", "down_proj", "act_fn" if hasattr(module, "act_fn") else "activation_fn"


def _activation_name(module: nn.Module) -> str | None:
    """Returns the operators' name of an activation; None for those that they do not have."""
    if has_hooks(module):
        return None
    if type(module) in (SiLUActivation, nn.SiLU):
        return "silu"
    if type(module) is ReLUSquaredActivation:
        return "square_relu"
    if type(module) is XIELUActivation:
        return "xielu"
    if type(module) is NewGELUActivation:
        return "gelu_new"
    if type(module) is GELUActivation and module.act is nn.functional.gelu:
        return "gelu"
    is_tanh = type(module) is GELUTanh and isinstance(module.act, functools.partial)  # not the formula in Python
    return "gelu_tanh" if is_tanh else None


def _fused_attention(module: nn.Module, calls: Sequence[AttentionCall], on_cpu: bool) -> nn.Module | None:
    has_norms = code_fingerprint.is_attention_with_norms(module)
    if not has_norms and not code_fingerprint.is_attention(module):
        return None
    call = next((call for call in calls if call.layer == module.layer_idx), None)
    rotation = rotation_of(module)
    if call is None or rotation is None or not _has_shape_of(module, call):
        return None
    norms = _head_norms(module, call) if has_norms else HeadNorms()
    if norms is None or not (on_cpu or _is_for_cuda(module, rotation)):
        return None
    gates, out_name = code_fingerprint.gates_of(module), code_fingerprint.name_of_output(module)
    fused = FusedAttention(module, call, norms, rotation, kv_source_of(module), gates, out_name)
    return scaled_attention(fused, module)


def _is_for_cuda(attention: nn.Module, rotation: Rotation) -> bool:
    """Whether the operators on CUDA do what the attention does between its products."""
    is_whole = rotation.is_applied and not rotation.is_partial and code_fingerprint.gates_of(attention) == "none"
    is_all = not rotation.norms_last and rotation.scaling is None and kv_source_of(attention) == OWN_KV
    return is_whole and is_all and not rotation.is_wide and not code_fingerprint.norms_all_heads(attention)


def _head_norms(attention: nn.Module, call: AttentionCall) -> HeadNorms | None:
    names = code_fingerprint.names_of_head_norms(attention)[: 2 if has_own_keys(attention) else 1]
    norms = [norm for name in names if (norm := _head_norm(getattr(attention, name))) is not None]
    if len(norms) < len(names) or len({(type(norm), norm.eps) for norm in norms}) > 1:
        return None
    if not all(_fits_heads(attention, *each) for each in zip(norms, (call.query, call.key), strict=False)):
        return None
    both = HeadNorms(norms[0], norms[1] if len(norms) > 1 else None)
    if not norms_values(attention):
        return both
    value = getattr(attention, "v_norm", None)
    return both._replace(value=value) if isinstance(value, FusedRMSNorm) else None


def _head_norm(norm: nn.Module) -> FusedNorm | None:
    """Returns the fused norm of heads that the module is, or the one that does what its norms of single heads do."""
    if not code_fingerprint.is_norm_of_each_head(norm):
        return norm if isinstance(norm, FusedNorm) else None
    norms = [*cast(Any, norm).norms]
    if not all(isinstance(each, FusedLayerNorm) and each.bias is None for each in norms):
        return None
    return FusedLayerNorm(_fixed(torch.cat([each.weight for each in norms])), None, norms[0].eps, len(norms))


def _fits_heads(attention: nn.Module, norm: FusedNorm, heads: Tensor) -> bool:  # [T, N, D]
    """Whether the norm is one of a head, or of all as the attention's are."""
    if isinstance(norm, FusedLayerNorm) and norm.num_heads > 1:
        return norm.num_heads == heads.shape[1] and norm.weight.numel() == heads[0].numel()
    size = heads[0].numel() if code_fingerprint.norms_all_heads(attention) else heads.shape[2]
    return norm.weight.numel() == size


def _has_shape_of(attention: nn.Module, call: AttentionCall) -> bool:
    """Whether all heads have one even size, and the projections have as many output columns as the call's tensors."""
    heads = call.query.shape[1], call.key.shape[1]
    values, gates = kv_source_of(attention).values, code_fingerprint.gates_of(attention)
    names = names_of_head_layers(attention, len(head_counts(values, *heads)), gates)
    if (
        not _are_linear(attention, *names, code_fingerprint.name_of_output(attention))
        or len({part.shape[2] for part in call[:3]}) > 1
    ):
        return False
    sizes = [cast(nn.Linear, getattr(attention, name)).out_features for name in names]
    columns = [count * call.query.shape[2] for count in projected_heads(values, gates, *heads)]
    return call.query.shape[2] % 2 == 0 and sizes == ([sum(columns)] if len(names) == 1 < len(columns) else columns)


def _fused_layer(module: nn.Module, on_cpu: bool) -> nn.Module | None:
    form = form_of_layer(module)
    if form is None or not (on_cpu or _is_form_for_cuda(form)):
        return None
    if form.input is not None and not _is_input_known(module, form.input):
        return None
    names = *form.names, *(form.beside or ())[2:]
    norms = [getattr(module, name) for name in names if name is not None]
    return FusedDecoderLayer(module, form) if all(isinstance(norm, FusedNorm) for norm in norms) else None


def _is_input_known(layer: Any, names: LayerInput) -> bool:
    are_known = _are_linear(layer, names.gate, names.projection) and isinstance(getattr(layer, names.norm), FusedNorm)
    return are_known and _activation_name(layer.act_fn) == "gelu_tanh"


def _is_form_for_cuda(form: LayerForm) -> bool:
    has_norms_before = form.names.attention is not None and form.names.mlp is not None
    is_whole = form.multiplier is None and form.beside is None and form.input is None and form.factor == 1.0
    return has_norms_before and is_whole and not form.is_parallel


def _are_linear(module: nn.Module, *names: str) -> bool:
    layers = [getattr(module, name) for name in names]
    return all(isinstance(layer, nn.Linear) and is_linear(layer) for layer in layers)
