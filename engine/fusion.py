"""Puts fused modules in place of the parts of a model whose code is known, on the CPU and with kernels only.

What is not known stays as transformers has it: each part is taken by itself.
"""

from collections.abc import Sequence

from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from engine import known_code
from engine.attention_hook import AttentionCall
from engine.fused_modules import FusedAttention, FusedDecoderLayer, FusedMLP, FusedRMSNorm
from engine.linear import is_linear
from engine.module_swap import swap_modules

__all__ = ["fuse_modules", "fuse_norms"]

_ACTIVATIONS: dict[type, str] = {SiLUActivation: "silu", nn.SiLU: "silu", GELUTanh: "gelu_tanh"}


def fuse_modules(model: nn.Module, calls: Sequence[AttentionCall]) -> None:
    """Swaps modules of `model` in place; `calls` holds one attention call of each layer.

    To be called before the linear layers are packed, since it joins some of them.
    """
    fuse_norms(model)
    swap_modules(model, _fused_mlp)
    swap_modules(model, lambda module: _fused_attention(module, calls))
    swap_modules(model, _fused_layer)


def fuse_norms(model: nn.Module) -> None:
    """Swaps the norms only, whose sums have an order of their own; the other swaps change no bit of a result."""
    swap_modules(model, lambda module: FusedRMSNorm(module) if known_code.is_rms_norm(module) else None)


def _fused_mlp(module: nn.Module) -> nn.Module | None:
    if not known_code.is_gated_mlp(module) or not _are_linear(module, "gate_proj", "up_proj", "down_proj"):
        return None
    activation = _ACTIVATIONS.get(type(module.act_fn))
    return None if activation is None else FusedMLP(module, activation)


def _fused_attention(module: nn.Module, calls: Sequence[AttentionCall]) -> nn.Module | None:
    if not known_code.is_attention(module) or not _are_linear(module, "q_proj", "k_proj", "v_proj", "o_proj"):
        return None
    norms = [child for name, child in module.named_children() if name in ("q_norm", "k_norm")]
    if not all(isinstance(norm, FusedRMSNorm) for norm in norms):
        return None
    call = calls[int(module.layer_idx)]  # type: ignore[arg-type]
    is_even = call.query.shape[2] == call.value.shape[2] and call.query.shape[2] % 2 == 0
    return FusedAttention(module, call) if is_even else None


def _fused_layer(module: nn.Module) -> nn.Module | None:
    if not known_code.is_decoder_layer(module):
        return None
    norms = (module.input_layernorm, module.post_attention_layernorm)
    return FusedDecoderLayer(module) if all(isinstance(norm, FusedRMSNorm) for norm in norms) else None


def _are_linear(module: nn.Module, *names: str) -> bool:
    return all(is_linear(getattr(module, name)) for name in names)
