"""A causal convolution between two gates, as in LFM2: of rows that have both gates and what is convolved."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["ShortConvolution"]


class ShortConvolution(NamedTuple):
    """The convolution over the step's tokens, for the CPU with kernels."""

    rows: Tensor  # [num_tokens, 3 * channels]: gates of x, gates of the result, x
    weight: Tensor  # [taps, channels], the newest token's last, in float32
    bias: Tensor | None  # [channels], in float32

    @property
    def state_shape(self) -> StateShape:
        taps, channels = self.weight.shape
        return StateShape((taps - 1, channels), self.rows.dtype)

    def take(self, rows: Tensor) -> "ShortConvolution":
        return self._replace(rows=self.rows[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns what the gates leave of the convolution, [num_tokens, channels]."""
        places = metadata.slots, metadata.first_tokens
        return cast(Tensor, torch.ops.twostep.short_convolution(*self, states, *places))
