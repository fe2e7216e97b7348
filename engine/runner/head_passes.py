"""The passes of a head, MTP or EAGLE-3, and the hidden states that it reads, which the KV cache keeps."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.runner.forward import ForwardOutput, HeadForward, HiddenOf
from engine.runner.model_inputs import ModelInputs

__all__ = ["HeadPasses", "HeadRunner", "HiddenBefore"]


class HiddenBefore(NamedTuple):
    """Which hidden states a pass reads, those of the tokens before its own: kept ones, or what the last pass made."""

    slots: Sequence[int]
    """The slots in which they are kept, [num_tokens]; -1 stands for zeros, before the first token."""
    rows: Sequence[int] | None = None
    """Rows of the last pass's results, in place of slots."""


class HeadRunner(Protocol):
    """Runs a head."""

    @property
    def hidden_of(self) -> HiddenOf:
        """The model's hidden states that it needs."""

    def keep(self, slots: Tensor, hidden: Tensor) -> None:
        """Keeps what is needed of the hidden states [num_tokens, ...] of tokens in these slots [num_tokens]."""

    def __call__(self, inputs: ModelInputs, before: HiddenBefore, kept: Sequence[int]) -> ForwardOutput:
        """Computes the batch, with results at the `kept` positions."""


class HeadPasses:
    """Implements `HeadRunner` by a forward pass.

    Rows are taken and put by `index_select` and `index_copy_`: indexing by a tensor waits for all of torch's threads,
    which takes milliseconds where their cores have other work.
    """

    def __init__(self, forward: HeadForward, hidden: Tensor) -> None:
        """`hidden` [num_blocks, block_size, hidden_size] has the place in which the model's hidden states are kept."""
        self.hidden_of: HiddenOf = forward.hidden_of
        self.forward = forward
        self._hidden = hidden.flatten(0, 1)
        self._last = hidden[:0, 0]

    def keep(self, slots: Tensor, hidden: Tensor) -> None:
        self._hidden.index_copy_(0, slots, self.forward.kept_of(hidden))

    def __call__(self, inputs: ModelInputs, before: HiddenBefore, kept: Sequence[int]) -> ForwardOutput:
        output = self.forward(inputs, self._states(before), kept)
        self._last = output.hidden
        return output

    def _states(self, before: HiddenBefore) -> Tensor:
        device = self._hidden.device
        if before.rows is not None:
            return self._last.index_select(0, torch.tensor(before.rows, dtype=torch.int64, device=device))
        slots = torch.tensor([max(slot, 0) for slot in before.slots], device=device)
        hidden = self._hidden.index_select(0, slots)
        if first := [row for row, slot in enumerate(before.slots) if slot < 0]:
            hidden[first] = 0.0
        return hidden
