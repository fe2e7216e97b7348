"""A causal convolution of each channel by itself over a few tokens; its state is the tokens before the next one."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["Convolution"]


class Convolution(NamedTuple):
    """A depthwise convolution over the step's tokens."""

    x: Tensor  # [num_tokens, channels]
    weight: Tensor  # [channels, taps], the newest token's last
    bias: Tensor | None  # [channels]

    @property
    def state_shape(self) -> StateShape:
        channels, taps = self.weight.shape
        return StateShape((taps - 1, channels), self.x.dtype)

    def take(self, rows: Tensor) -> "Convolution":
        return self._replace(x=self.x[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns the convolution [num_tokens, channels], summed from the oldest token on in float32; writes the newest
        tokens of each sequence to its slot of `states`."""
        width = self.weight.shape[1] - 1
        taps, last = metadata.windows(width)
        rows = torch.cat([states[metadata.slots].flatten(0, 1), self.x])
        states[metadata.slots] = rows[last].view(-1, *states.shape[1:])
        weight = self.weight.float().t()
        total = rows[taps[0]].float() * weight[0]
        for tap in range(1, width + 1):
            total = total + rows[taps[tap]].float() * weight[tap]
        return (total if self.bias is None else total + self.bias.float()).to(self.x.dtype)
