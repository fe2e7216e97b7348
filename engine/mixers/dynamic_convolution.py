"""A causal convolution over a few tokens whose weights are each token's own, and some of all tokens (Inkling 2)."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["DynamicConvolution"]


class DynamicConvolution(NamedTuple):
    """A convolution over the step's tokens of groups of channels, whose tokens add a weight to that of each channel."""

    x: Tensor  # [num_tokens, channels], in float32
    weights: Tensor  # [num_tokens, taps, groups], the newest token's last, in float32
    weight: Tensor  # [taps, channels], in float32

    @property
    def state_shape(self) -> StateShape:
        taps, channels = self.weight.shape
        return StateShape((taps - 1, channels), self.x.dtype)

    def take(self, rows: Tensor) -> "DynamicConvolution":
        return self._replace(x=self.x[rows], weights=self.weights[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns the convolution [num_tokens, channels], summed from the oldest token on; writes the newest tokens of
        each sequence to its slot of `states`."""
        taps, last = metadata.windows(len(self.weight) - 1)
        rows = torch.cat([states[metadata.slots].flatten(0, 1), self.x])
        states[metadata.slots] = rows[last].view(-1, *states.shape[1:])
        total = torch.zeros_like(self.x)
        for tap, weight in enumerate(self.weight):
            total += rows[taps[tap]] * self._weights_of(tap, weight)
        return total

    def _weights_of(self, tap: int, weight: Tensor) -> Tensor:
        """Returns what each token multiplies another one by: [num_tokens, channels]."""
        own = self.weights[:, tap, :, None]  # [num_tokens, groups, 1]
        return (weight.view(own.shape[1], -1) + own).flatten(1)
