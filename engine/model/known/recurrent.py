"""Recognizes recurrent layers of transformers whose computation is known."""

from typing import Any, cast

import torch
from torch import nn

from engine.mixers.convolution import KERNEL_TAPS
from engine.model.known.same_code import is_like, is_of

__all__ = ["is_delta_net", "is_mamba2", "is_scaled_mamba2", "is_short_convolution"]

_DELTA_NETS = {
    "qwen3_5.Qwen3_5GatedDeltaNet": "qwen3_5.Qwen3_5RMSNormGated",
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": "qwen3_5_moe.Qwen3_5MoeRMSNormGated",
    "qwen3_next.Qwen3NextGatedDeltaNet": "qwen3_next.Qwen3NextRMSNormGated",
    "qwen4_exp.Qwen4ExpTextGatedDeltaNet": "qwen4_exp.Qwen4ExpTextRMSNormGated",
}
"""Gated delta nets, and their norms."""
_SCALED_MAMBA2 = "falcon_h1.FalconH1Mixer"
_MAMBA2 = {
    "granitemoehybrid.GraniteMoeHybridMambaLayer": "granitemoehybrid.GraniteMoeHybridRMSNormGated",
    "bamba.BambaMixer": "bamba.BambaRMSNormGated",
    "mamba2.Mamba2Mixer": "mamba2.MambaRMSNormGated",
    "nemotron_h.NemotronHMamba2Mixer": "nemotron_h.NemotronHRMSNormGated",
    "zamba2.Zamba2MambaMixer": "zamba2.Zamba2RMSNormGated",
    _SCALED_MAMBA2: "falcon_h1.FalconH1RMSNormGated",  # or none
}
"""Layers of Mamba-2, and their norms."""
_SHORT_CONVOLUTIONS = ("lfm2.Lfm2ShortConv", "lfm2_moe.Lfm2MoeShortConv", "lfm3.Lfm3ShortConv")


def is_delta_net(module: nn.Module) -> bool:
    """Whether the module is a gated delta net."""
    if not is_of(module, *_DELTA_NETS):
        return False
    net: Any = module
    is_plain = net.activation == "silu" and net.conv1d.bias is None and net.norm.activation in ("silu", "sigmoid")
    return is_plain and is_of(net.norm, *_DELTA_NETS.values()) and net.norm.weight.dtype == net.conv1d.weight.dtype


def is_mamba2(module: nn.Module) -> bool:
    """Whether the module is a layer of Mamba-2 that norms what it reads in as many groups as it has of heads."""
    if not is_of(module, *_MAMBA2) or module.training:
        return False
    layer: Any = module
    is_plain = layer.activation in ("silu", "swish") and layer.conv1d.kernel_size[0] <= KERNEL_TAPS
    dtype = layer.in_proj.weight.dtype
    is_rounded = not is_scaled_mamba2(layer) or layer.mup_vector.dtype == dtype
    return is_plain and is_rounded and _is_norm_known(layer, dtype)


def is_scaled_mamba2(layer: nn.Module) -> bool:
    """Whether a known layer of Mamba-2 multiplies its rows, and columns of its first product, by `ssm_in_multiplier`
    and `mup_vector`."""
    return is_of(layer, _SCALED_MAMBA2)


def _is_norm_known(layer: Any, dtype: torch.dtype) -> bool:
    norm, inner = layer.norm, int(layer.num_heads) * int(layer.head_dim)
    if is_scaled_mamba2(layer) and is_like(norm, nn.Identity):
        return True
    if not is_of(norm, *_MAMBA2.values()) or norm.weight.dtype != dtype:
        return False
    if is_scaled_mamba2(layer):
        return norm.n_groups == layer.n_groups and not norm.norm_before_gate
    return bool(norm.group_size * layer.n_groups == inner)


def is_short_convolution(module: nn.Module) -> bool:
    """Whether the module is a short convolution between two gates, of as many taps as the kernels take."""
    return is_of(module, *_SHORT_CONVOLUTIONS) and cast(Any, module).conv.kernel_size[0] <= KERNEL_TAPS
