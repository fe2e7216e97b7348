"""Linear attention: a state of one matrix per head, which decays, gets the outer product of a key and a value at each
token, and is read by a query.

It is the recurrence of gated delta nets (Yang et al., Gated Delta Networks, 2024), of Kimi delta attention, whose decay
is one number per key channel, and of Mamba-2 (Dao and Gu, Transformers are SSMs, 2024), which writes the value itself.
Prompts and single tokens go through the same steps, token by token: forms that compute several tokens at once add in
another order.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import load_kernels
from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape
from engine.mixers.sums import fixed_sum

__all__ = ["LinearAttention", "matrix_shape"]

_PANEL = 16  # columns, as in engine/kernels/base/vec.h


class LinearAttention(NamedTuple):
    """Linear attention over the step's tokens, in float32.

    A group of heads that follow one another shares a query and a key.
    """

    query: Tensor  # [num_tokens, num_groups, key size]
    key: Tensor  # [num_tokens, num_groups, key size]
    value: Tensor  # [num_tokens, num_heads, value size]
    decay: Tensor  # [num_tokens, num_heads, 1 or key size]: factor of the state
    rate: Tensor | None  # [num_tokens, num_heads]: how much of the value's error is written; None writes the value

    @property
    def state_shape(self) -> StateShape:
        return matrix_shape(self.value.shape[1], self.key.shape[2], self.value.shape[2])

    def take(self, rows: Tensor) -> "LinearAttention":
        query, key, value, decay = (each[rows] for each in self[:4])
        return LinearAttention(query, key, value, decay, None if self.rate is None else self.rate[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns what the queries read, [num_tokens, num_heads, value size], each after its own token's write."""
        if states.device.type == "cpu" and load_kernels() is not None:
            return cast(
                Tensor, torch.ops.twostep.linear_attention(*self, states, metadata.slots, metadata.first_tokens)
            )
        return self.advance_in_torch(states, metadata)

    def advance_in_torch(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Computes what `advance` does, to the same bits, thousands of times slower."""
        num_in_group = self.value.shape[1] // self.key.shape[1]
        query, key = (each.repeat_interleave(num_in_group, 1)[:, :, None] for each in (self.query, self.key))
        num_panels = states.shape[2]
        values = functional.pad(self.value, (0, num_panels * _PANEL - self.value.shape[2]))
        values = values.view(*values.shape[:2], num_panels, _PANEL)
        output = torch.empty_like(values)
        for step in range(max(metadata.lengths)):
            running = [index for index, length in enumerate(metadata.lengths) if step < length]
            rows = torch.tensor([metadata.starts[index] + step for index in running])
            slots = metadata.slots[running]
            state = states[slots] * self.decay[rows][:, :, None, :, None]
            value = values[rows]
            if self.rate is not None:
                value = (value - fixed_sum(state * key[rows][..., None], -2)) * self.rate[rows][..., None, None]
            state = state + key[rows][..., None] * value[..., None, :]
            output[rows] = fixed_sum(state * query[rows][..., None], -2)
            states[slots] = state
        return output.flatten(2)[..., : self.value.shape[2]]


def matrix_shape(num_heads: int, key_size: int, value_size: int) -> StateShape:
    """Returns the shape of a matrix [key size, value size] per head: its columns lie in panels, the last one filled."""
    return StateShape((num_heads, -(-value_size // _PANEL), key_size, _PANEL), torch.float32)
