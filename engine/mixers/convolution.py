"""A causal convolution of each channel by itself over a few tokens; its state is the tokens before the next one."""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import load_kernels
from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["KERNEL_TAPS", "Convolution"]

_KERNEL_DTYPES = torch.float32, torch.bfloat16
KERNEL_TAPS = 16  # at most, as in engine/kernels/recurrent/convolution.cpp


class Convolution(NamedTuple):
    """A depthwise convolution over the step's tokens."""

    x: Tensor  # [num_tokens, channels]
    weight: Tensor  # [taps, channels], the newest token's last, in float32
    bias: Tensor | None  # [channels], in float32
    is_gated: bool = False
    """Whether a result r becomes silu(r)."""

    @property
    def state_shape(self) -> StateShape:
        taps, channels = self.weight.shape
        return StateShape((taps - 1, channels), self.x.dtype)

    def take(self, rows: Tensor) -> "Convolution":
        return self._replace(x=self.x[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns the convolution [num_tokens, channels], summed from the oldest token on in float32; writes the newest
        tokens of each sequence to its slot of `states`."""
        is_known = self.x.dtype in _KERNEL_DTYPES and len(self.weight) <= KERNEL_TAPS
        if is_known and states.device.type == "cpu" and load_kernels() is not None:
            places = metadata.slots, metadata.first_tokens
            return cast(Tensor, torch.ops.twostep.causal_convolution(*self, states, *places))
        return self.advance_in_torch(states, metadata)

    def advance_in_torch(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Computes what `advance` does, to the same bits where no sum is subnormal."""
        width = len(self.weight) - 1
        taps, last = metadata.windows(width)
        rows = torch.cat([states[metadata.slots].flatten(0, 1), self.x])
        states[metadata.slots] = rows[last].view(-1, *states.shape[1:])
        total = rows[taps[0]].float() * self.weight[0]
        for tap in range(1, width + 1):
            total = total + rows[taps[tap]].float() * self.weight[tap]
        out = (total if self.bias is None else total + self.bias).to(self.x.dtype)
        return functional.silu(out) if self.is_gated else out
