"""The scan of Mamba-2 (Dao and Gu, Transformers are SSMs, 2024) with what is computed before it: linear attention whose
decays, and what values are multiplied by, come from one number per head."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.mixers.linear_attention import matrix_shape
from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["Mamba2Scan"]


class Mamba2Scan(NamedTuple):
    """The scan over the step's tokens, for the CPU with kernels."""

    rows: Tensor  # [num_tokens, num_heads * head size + 2 * num_groups * state size]: inputs, what writes, what reads
    time_step: Tensor  # [num_tokens, num_heads]: its softplus is the time in which states decay
    decay_rates: Tensor  # [num_heads], float32: logarithm of the decay in one unit of time, below zero
    time_bias: Tensor  # [num_heads], float32
    skip: Tensor  # [num_heads], float32: how much of an input is added to what is read
    least_time: float
    most_time: float
    num_groups: int
    state_size: int

    @property
    def state_shape(self) -> StateShape:
        num_heads = self.time_step.shape[1]
        head_size = (self.rows.shape[1] - 2 * self.num_groups * self.state_size) // num_heads
        return matrix_shape(num_heads, self.state_size, head_size)

    def take(self, rows: Tensor) -> "Mamba2Scan":
        return self._replace(rows=self.rows[rows], time_step=self.time_step[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns what each token reads, [num_tokens, num_heads * head size] in float32."""
        places = metadata.slots, metadata.first_tokens
        return cast(Tensor, torch.ops.twostep.mamba2_scan(*self[:8], states, *places))
