"""The ids of a token and of those before it; the state is the ids before the next one."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.mixers.metadata import StateMetadata
from engine.mixers.state import StateShape

__all__ = ["NO_TOKEN", "TokenWindow"]

NO_TOKEN = -1
"""What stands for a token before a sequence's first one."""


class TokenWindow(NamedTuple):
    """Windows of the step's tokens."""

    token_ids: Tensor  # [num_tokens] int64
    num_before: int
    """How many tokens before its own a window has."""

    @property
    def state_shape(self) -> StateShape:
        return StateShape((self.num_before,), self.token_ids.dtype)

    def take(self, rows: Tensor) -> "TokenWindow":
        return self._replace(token_ids=self.token_ids[rows])

    def advance(self, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Returns the window of each token [num_tokens, num_before + 1], oldest first; writes the newest tokens of each
        sequence to its slot of `states`, which are of nothing where they are zero."""
        taps, last = metadata.windows(self.num_before)
        rows = torch.cat([states[metadata.slots].flatten() + NO_TOKEN, self.token_ids])
        states[metadata.slots] = rows[last].view(-1, self.num_before) - NO_TOKEN
        return rows[taps].t()
