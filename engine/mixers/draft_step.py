"""A step that verifies draft tokens: which of them its states are to have seen is known only after it.

A state cannot go back. So the states of sequences with draft tokens stay as they are during the step: each mixer
advances copies of its own, which are dropped once it has computed its outputs, and what it was called with is kept.
When the accepted tokens are known, the mixers run once more, over these alone, and that is all that runs twice. They go
on token by token, so they leave the bits that steps of single tokens leave.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from engine.mixers.metadata import StateMetadata
from engine.mixers.registry import JointMixer, Mixer

__all__ = ["DraftStep"]


class DraftStep:
    """One step over the states of all mixers, until `settle` ends it."""

    def __init__(self, metadata: StateMetadata) -> None:
        """States of sequences with draft tokens are not to be saved: it is not known which these are."""
        sequences = range(len(metadata.lengths))
        self._drafting = [index for index in sequences if metadata.num_drafts[index]]
        self._slots = metadata.slots[self._drafting]
        own_rows = [_rows_of(metadata, index) for index in self._drafting]
        lengths = [len(rows) for rows in own_rows]
        self._on_copies = _metadata([*range(len(lengths))], lengths, metadata.device)
        others = [index for index in sequences if not metadata.num_drafts[index]]
        other_rows = [_rows_of(metadata, index) for index in others]
        self._on_others = _metadata(metadata.slots[others].tolist(), [*map(len, other_rows)], metadata.device)
        self._rows, self._other_rows = _joined(own_rows, metadata.device), _joined(other_rows, metadata.device)
        self._places = torch.cat([self._rows, self._other_rows]).argsort()  # of the batch's rows in both, one by one
        self._calls: list[tuple[Any, Any]] = []  # mixers, and the states of each

    def advance(self, mixer: Mixer, states: Tensor) -> Tensor:
        """Returns what the mixer computes from its `states`, and advances those of sequences without draft tokens."""
        return self._advance(mixer, states, states[self._slots])

    def advance_jointly(self, mixer: JointMixer, states: tuple[Tensor, ...]) -> Tensor:
        """Does what `advance` does for a mixer of several states."""
        return self._advance(mixer, states, tuple(each[self._slots] for each in states))

    def _advance(self, mixer: Any, states: Any, copies: Any) -> Tensor:
        """`copies` are those of states of sequences with draft tokens."""
        drafting = mixer.take(self._rows)
        self._calls.append((drafting, states))
        output = drafting.advance(copies, self._on_copies)
        if self._on_others.lengths:
            others = mixer.take(self._other_rows).advance(states, self._on_others)
            output = torch.cat([output, others])[self._places]
        return cast(Tensor, output)

    def settle(self, num_kept: Sequence[int]) -> None:
        """Advances the states that `advance` left as they were, by the first `num_kept` tokens of each sequence of the
        batch."""
        lengths = [num_kept[index] for index in self._drafting]
        starts = self._on_copies.starts
        kept = [range(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        rows = _joined(kept, self._slots.device)
        metadata = _metadata(self._slots.tolist(), lengths, self._slots.device)
        for mixer, states in self._calls:
            mixer.take(rows).advance(states, metadata)
        self._calls.clear()


def _rows_of(metadata: StateMetadata, index: int) -> range:
    """Returns the rows of a sequence in the batch."""
    return range(metadata.starts[index], metadata.starts[index + 1])


def _joined(ranges: Sequence[range], device: torch.device) -> Tensor:
    return torch.tensor([row for own in ranges for row in own], dtype=torch.int64, device=device)


def _metadata(slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> StateMetadata:
    """Returns what mixers must know of sequences that have begun before."""
    return StateMetadata(slots, lengths, [False] * len(lengths), device)
