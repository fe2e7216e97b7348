"""The real-gated linear recurrence of an RG-LRU (De et al., Griffin, 2024): each channel has one number of state, which
decays as far as a gate lets it, and gets the input through another gate."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.kernels import load_kernels
from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["RealGatedRecurrence"]

_KERNEL_DTYPES = torch.float32, torch.bfloat16


class RealGatedRecurrence(NamedTuple):
    """A real-gated linear recurrence over the step's tokens, in float32."""

    x: Tensor  # [num_tokens, channels]
    gates: Tensor  # [num_tokens, num_heads, 2, channels / num_heads]: of the input and of the decay, before the sigmoid
    rates: Tensor  # [channels]: logarithm of the decay where its gate is open, not above zero, in float32
    is_first: Tensor  # [num_tokens] bool: whether the token is its sequence's first, whose input keeps its size

    @property
    def state_shape(self) -> StateShape:
        return StateShape(tuple(self.rates.shape), torch.float32)

    def take(self, rows: Tensor) -> "RealGatedRecurrence":
        return self._replace(x=self.x[rows], gates=self.gates[rows], is_first=self.is_first[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns the states after each token, [num_tokens, channels] in the inputs' dtype."""
        if self.x.dtype in _KERNEL_DTYPES and states.device.type == "cpu" and load_kernels() is not None:
            places = metadata.slots, metadata.first_tokens
            return cast(Tensor, torch.ops.twostep.real_gated_recurrence(*self, states, *places))
        return self.advance_in_torch(states, metadata)

    def advance_in_torch(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Computes what `advance` does, but for how decays are rounded, many times slower."""
        opened, decaying = torch.sigmoid(self.gates.float()).unbind(2)  # [T, H, channels of a head] each
        exponents = self.rates * decaying.flatten(1)
        decay = torch.exp(exponents)
        spread = torch.sqrt(torch.clamp(1.0 - torch.exp(exponents + exponents), min=0.0))
        spread = torch.where(self.is_first[:, None], 1.0, spread)
        written = self.x.float() * opened.flatten(1) * spread
        output = torch.empty_like(self.x)
        for step in range(max(metadata.lengths)):
            running = [index for index, length in enumerate(metadata.lengths) if step < length]
            rows = torch.tensor([metadata.starts[index] + step for index in running])
            slots = metadata.slots[running]
            state = states[slots] * decay[rows] + written[rows]
            output[rows] = state.to(output.dtype)
            states[slots] = state
        return output
