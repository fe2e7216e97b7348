"""Recognizes recurrent layers of transformers whose computation is known."""

from typing import Any, cast

from torch import nn

from engine.mixers.convolution import KERNEL_TAPS
from engine.model.known.same_code import is_of

__all__ = ["is_delta_net", "is_short_convolution"]

_DELTA_NETS = ("qwen3_5.Qwen3_5GatedDeltaNet", "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet")
_GATED_NORMS = ("qwen3_5.Qwen3_5RMSNormGated", "qwen3_5_moe.Qwen3_5MoeRMSNormGated")
_SHORT_CONVOLUTIONS = ("lfm2.Lfm2ShortConv", "lfm2_moe.Lfm2MoeShortConv", "lfm3.Lfm3ShortConv")


def is_delta_net(module: nn.Module) -> bool:
    """Whether the module is a gated delta net whose heads have one order in all its projections."""
    if not is_of(module, *_DELTA_NETS):
        return False
    net: Any = module
    is_plain = net.activation == "silu" and net.conv1d.bias is None and net.norm.activation == "silu"
    return is_plain and is_of(net.norm, *_GATED_NORMS) and net.norm.weight.dtype == net.conv1d.weight.dtype


def is_short_convolution(module: nn.Module) -> bool:
    """Whether the module is a short convolution between two gates, of as many taps as the kernels take."""
    return is_of(module, *_SHORT_CONVOLUTIONS) and cast(Any, module).conv.kernel_size[0] <= KERNEL_TAPS
