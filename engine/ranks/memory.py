"""The memory that ranks share: a file without a name, which ends with the last process that has it."""

import os
from collections.abc import Sequence
from typing import Any, cast

import torch

from engine.weights.rank_group import Gather, RankGroup

__all__ = ["SharedMemory", "new_memory", "open_group"]

_PART_BYTES = 1 << 21  # at least a row of logits; more rows than fit are exchanged in several turns
_TIMEOUT_S = 1800.0  # ranks that load do not keep step; the end of a process is noticed at once


def new_memory(size: int) -> int:
    """Returns the descriptor of memory for `size` ranks. It takes none before it is used."""
    descriptor = os.memfd_create("twostep-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, torch.ops.twostep.exchange_size(size, _PART_BYTES))
    return descriptor


def open_group(descriptor: int, rank: int, size: int) -> RankGroup:
    """Returns the group of a rank, over the memory behind the descriptor."""
    exchange = torch.classes.twostep.Exchange(descriptor, rank, size, _PART_BYTES, _TIMEOUT_S)
    return RankGroup(rank, size, SharedMemory(exchange))


class SharedMemory:
    """Implements `engine.weights.rank_group.Exchange` by the kernels (`engine/kernels/ranks`)."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange

    def gather(self, starts: Sequence[int]) -> Gather:
        return cast(Gather, torch.classes.twostep.Gather(self._exchange, [*starts]))

    def abort(self) -> None:
        self._exchange.abort()
