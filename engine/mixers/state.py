"""The states of recurrent mixers: a slot for each running request, which has one state of each mixer."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["StateCache", "StateShape", "bytes_per_slot"]


class StateShape(NamedTuple):
    """Shape and type of the state of one mixer and one request."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class StateCache:
    """The states of all mixers in all slots: those of running requests, and behind them those of copies."""

    def __init__(self, shapes: Sequence[StateShape], num_slots: int, device: torch.device, num_copies: int = 0) -> None:
        """Has `num_slots` slots for running requests, and `num_copies` more behind them."""
        self.num_slots, self.num_copies = num_slots, num_copies
        num_all = num_slots + num_copies
        self.states = tuple(torch.zeros(num_all, *shape.sizes, dtype=shape.dtype, device=device) for shape in shapes)
        """States of each mixer, in the order in which a forward pass calls them: [num_slots + num_copies, *sizes]."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.states)

    def slot_bytes(self, slot: int) -> list[np.ndarray]:
        """Returns the memory of a slot in all mixers, each as bytes [num_bytes]. For the CPU only."""
        return [tensor[slot].view(-1).view(torch.uint8).numpy() for tensor in self.states]

    def fill_slot(self, slot: int, content: memoryview) -> None:
        """Overwrites a slot with the bytes of `slot_bytes`, joined. Other threads than that of the steps may call it,
        for slots that no step reads or writes."""
        start = 0
        for part in self.slot_bytes(slot):
            part[:] = np.frombuffer(content[start : start + len(part)], np.uint8)
            start += len(part)


def bytes_per_slot(shapes: Sequence[StateShape]) -> int:
    """Bytes that the states of one request take, over all mixers."""
    return sum(shape.num_bytes for shape in shapes)


def copy_slots(states: Tensor, pairs: Tensor) -> None:
    """Copies the states of slots to other ones: `pairs` [n, 2] have the slot from which and the one to which."""
    if len(pairs):
        states[pairs[:, 1]] = states[pairs[:, 0]]


def clear(states: Tensor, slots: Tensor) -> None:
    """Sets the states of these slots to what they are before a request's first token."""
    if len(slots):
        states.index_fill_(0, slots, 0)
