"""What a recurrent mixer must know of the step's batch."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

__all__ = ["StateMetadata"]


class StateMetadata:
    """Where each sequence's tokens lie in the flat batch, and which slot holds the states it goes on from.

    The tokens of sequence i are the half-open range [starts[i], starts[i + 1]) of the batch.
    """

    def __init__(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        is_first: Sequence[bool],
        device: torch.device,
        restored: Sequence[tuple[int, int]] = (),
        saved: Sequence[tuple[int, int]] = (),
        num_drafts: Sequence[int] = (),
    ) -> None:
        """`is_first` tells of each sequence whether the step computes its first token, before which all states are
        zero. `restored` are slots from and to which states are copied before the step, and `saved` after it.
        `num_drafts` tells of each sequence how many of its tokens, the last ones, are draft tokens; by default none."""
        self.slots = torch.tensor(slots, device=device)  # [num_seqs] int64
        fresh = [slot for slot, first in zip(slots, is_first, strict=True) if first]
        self.fresh_slots = torch.tensor(fresh, dtype=torch.int64, device=device)
        self.starts = (*accumulate(lengths, initial=0),)
        self.first_tokens = torch.tensor(self.starts, device=device)  # [num_seqs + 1] int64, the same numbers
        self.lengths = (*lengths,)
        self.num_drafts = (*num_drafts,) or (0,) * len(self.lengths)
        self.device = device
        self.restored, self.saved = (torch.tensor(pairs, device=device).view(-1, 2) for pairs in (restored, saved))
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def has_drafts(self) -> bool:
        return any(self.num_drafts)

    def windows(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns where the tokens lie that a window of `width` earlier ones and its own reaches, and the last ones.

        Both are indices of the rows of [num_seqs * width + num_tokens], which are the earlier tokens of every sequence
        and then the step's own. The first is [width + 1, num_tokens], oldest first; the second [num_seqs * width].
        """
        if width not in self._windows:
            self._windows[width] = self._make_windows(width)
        return self._windows[width]

    def _make_windows(self, width: int) -> tuple[Tensor, Tensor]:
        # Of a sequence's rows, [0, width) are earlier tokens, and [width, width + length) are the step's own.
        num_earlier = len(self.lengths) * width
        rows = [
            [*range(index * width, (index + 1) * width), *range(num_earlier + start, num_earlier + end)]
            for index, (start, end) in enumerate(pairwise(self.starts))
        ]
        taps = [[row for own in rows for row in own[tap : len(own) - width + tap]] for tap in range(width + 1)]
        last = [row for own in rows for row in own[len(own) - width :]]
        return torch.tensor(taps, device=self.device), torch.tensor(last, dtype=torch.int64, device=self.device)
