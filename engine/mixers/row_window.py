"""The row of a token and those before it; the state is the rows before the next one."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["RowWindow"]


class RowWindow(NamedTuple):
    """Windows of the step's tokens; rows before a sequence's first token are zero."""

    rows: Tensor  # [num_tokens, size]
    num_before: int
    """How many rows before its own a window has."""

    @property
    def state_shape(self) -> StateShape:
        return StateShape((self.num_before, self.rows.shape[1]), self.rows.dtype)

    def take(self, rows: Tensor) -> "RowWindow":
        return self._replace(rows=self.rows[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns the window of each token [num_tokens, num_before + 1, size], oldest first; writes the newest rows of
        each sequence to its slot of `states`."""
        taps, last = metadata.windows(self.num_before)
        rows = torch.cat([states[metadata.slots].flatten(0, 1), self.rows])
        states[metadata.slots] = rows[last].view(-1, *states.shape[1:])
        return rows[taps].transpose(0, 1)
