"""What a layer of Mamba-2 does between its projections: a convolution, a scan, and gates with or without a norm.

As one operator it has two states, so it is a mixer of a kind of its own: see `JointMixer`.
"""

from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from engine.mixers.convolution import Convolution
from engine.mixers.linear_attention import matrix_shape
from engine.mixers.mamba2_scan import Mamba2Scan
from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["Mamba2Layer"]


class Mamba2Layer(NamedTuple):
    """The layer over the step's tokens, for the CPU with kernels."""

    rows: Tensor  # [num_tokens, columns]: gates, inputs of the convolution, and time steps
    taps: Tensor  # [taps, channels], float32
    bias: Tensor | None  # [channels], float32
    decay_rates: Tensor  # [num_heads], float32, as the next two
    time_bias: Tensor
    skip: Tensor
    least_time: float
    most_time: float
    num_groups: int
    norm_weight: Tensor | None  # [num_heads * head size]
    eps: float
    state_size: int

    @property
    def state_shapes(self) -> tuple[StateShape, StateShape]:
        num_taps, num_channels = self.taps.shape
        num_heads = len(self.skip)
        head_size = (num_channels - 2 * self.num_groups * self.state_size) // num_heads
        window = StateShape((num_taps - 1, num_channels), self.rows.dtype)
        return window, matrix_shape(num_heads, self.state_size, head_size)

    def take(self, rows: Tensor) -> Self:
        return self._replace(rows=self.rows[rows])

    def advance(self, states: tuple[Tensor, ...], metadata: StateMetadata) -> Tensor:
        """Returns what the last projection multiplies, [num_tokens, num_heads * head size]."""
        places = metadata.slots, metadata.first_tokens
        return cast(Tensor, torch.ops.twostep.mamba2_layer(*self[:-1], *states, *places))

    def advance_in_parts(self, states: tuple[Tensor, ...], metadata: StateMetadata) -> Tensor:
        """Computes what `advance` does, to the same bits, one part after the other."""
        window, matrices = states
        num_channels, num_heads = self.taps.shape[1], len(self.skip)
        inner = self.rows.shape[1] - num_channels - num_heads
        gates, inputs, time_step = torch.split(self.rows, [inner, num_channels, num_heads], dim=1)
        mixed = Convolution(inputs, self.taps, self.bias, is_gated=True).advance(window, metadata)
        numbers = self.decay_rates, self.time_bias, self.skip, self.least_time, self.most_time, self.num_groups
        read = Mamba2Scan(mixed, time_step, *numbers, self.state_size).advance(matrices, metadata)
        if self.norm_weight is None:
            return cast(Tensor, torch.ops.twostep.gated_reads(read, gates))
        norm = self.norm_weight, self.eps, self.num_groups
        return cast(Tensor, torch.ops.twostep.gated_group_norm(read, gates, *norm))
