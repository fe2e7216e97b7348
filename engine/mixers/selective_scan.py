"""The selective scan of Mamba (Gu and Dao, 2023): each channel has a few numbers of state, each with its own decay."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.kernels import load_kernels
from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape
from engine.mixers.sums import fixed_sum

__all__ = ["SelectiveScan"]


class SelectiveScan(NamedTuple):
    """A selective scan over the step's tokens, in float32."""

    x: Tensor  # [num_tokens, channels]
    time_step: Tensor  # [num_tokens, channels]
    rates: Tensor  # [channels, state size]: logarithm of the decay in one unit of time, below zero
    write: Tensor  # [num_tokens, state size]
    read: Tensor  # [num_tokens, state size]

    @property
    def state_shape(self) -> StateShape:
        return StateShape(tuple(self.rates.shape), torch.float32)

    def take(self, rows: Tensor) -> "SelectiveScan":
        return self._replace(
            x=self.x[rows], time_step=self.time_step[rows], write=self.write[rows], read=self.read[rows]
        )

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns what each token reads of the state after its own write, [num_tokens, channels]."""
        if states.device.type == "cpu" and load_kernels() is not None:
            places = metadata.slots, metadata.first_tokens
            return cast(Tensor, torch.ops.twostep.selective_scan(*self, states, *places))
        return self.advance_in_torch(states, metadata)

    def advance_in_torch(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Computes what `advance` does, but for how decays are rounded, many times slower."""
        output = torch.empty_like(self.x)
        for step in range(max(metadata.lengths)):
            running = [index for index, length in enumerate(metadata.lengths) if step < length]
            rows = torch.tensor([metadata.starts[index] + step for index in running])
            slots = metadata.slots[running]
            time_step = self.time_step[rows][..., None]
            decay = torch.exp(time_step * self.rates)
            state = states[slots] * decay + (time_step * self.write[rows][:, None]) * self.x[rows][..., None]
            output[rows] = fixed_sum(state * self.read[rows][:, None], -1)
            states[slots] = state
        return output
