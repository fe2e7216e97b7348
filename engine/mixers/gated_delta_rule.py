"""The gated delta rule with what a gated delta net computes before it: linear attention whose queries and keys have
length 1, and whose decays and rates come from two numbers per head."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.mixers.linear_attention import matrix_shape
from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["GatedDeltaRule"]


class GatedDeltaRule(NamedTuple):
    """The rule over the step's tokens, for the CPU with kernels."""

    qkv: Tensor  # [num_tokens, 2 * num_groups * key size + num_heads * value size]
    write: Tensor  # [num_tokens, num_heads]: its sigmoid is the rate
    time_step: Tensor  # [num_tokens, num_heads]: its softplus is the time in which states decay
    decay_rates: Tensor  # [num_heads], float32: logarithm of the decay in one unit of time, below zero
    time_bias: Tensor  # [num_heads], float32
    num_groups: int
    key_size: int

    @property
    def state_shape(self) -> StateShape:
        num_heads = self.write.shape[1]
        value_size = (self.qkv.shape[1] - 2 * self.num_groups * self.key_size) // num_heads
        return matrix_shape(num_heads, self.key_size, value_size)

    def take(self, rows: Tensor) -> "GatedDeltaRule":
        return self._replace(qkv=self.qkv[rows], write=self.write[rows], time_step=self.time_step[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns what the queries read, [num_tokens, num_heads * value size]."""
        places = metadata.slots, metadata.first_tokens
        return cast(Tensor, torch.ops.twostep.gated_delta_rule(*self[:6], states, *places))
