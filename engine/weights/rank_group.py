"""The ranks of one model, as each of them sees them: its own number, and how it gets what the others have computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ALONE", "Exchange", "Gather", "NoExchange", "RankGroup"]

_CPU = torch.device("cpu")


class Gather(Protocol):
    """Gathers the columns of all ranks. All ranks call it together."""

    def run(self, x: Tensor) -> Tensor:
        """Returns all ranks' columns [T, all] beside each other; `x` [T, own] are this one's."""
        ...


class Exchange(Protocol):
    """How ranks exchange columns: in shared memory (`engine.ranks.memory`), or among devices
    (`engine.ranks.device_exchange`)."""

    def gather(self, starts: Sequence[int]) -> Gather:
        """Returns what gathers columns, of which those of rank r are [starts[r], starts[r + 1])."""
        ...

    def abort(self) -> None:
        """Has no rank wait for another any more, which raises RuntimeError."""
        ...


class NoExchange:
    """The exchange of a rank that is alone, which nothing is gathered from."""

    def gather(self, starts: Sequence[int]) -> Gather:
        raise NotImplementedError

    def abort(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A rank among all, and the exchange between them. What is computed from gathered values is the same on every
    rank."""

    rank: int
    size: int
    exchange: Exchange
    device: torch.device = _CPU
    """Where tensors lie that are exchanged."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that schedules and samples."""
        return self.rank == 0

    def gather(self, starts: Sequence[int]) -> Gather:
        """Returns what gathers columns, of which those of rank r are [starts[r], starts[r + 1])."""
        return self.exchange.gather(starts)

    def values_of_all(self, *values: float) -> list[list[float]]:
        """Returns the numbers that each rank calls this with, by rank. All ranks call it together."""
        if self.size == 1:
            return [[*values]]
        own = torch.tensor([values], dtype=torch.float64, device=self.device)
        starts = range(0, (self.size + 1) * len(values), len(values))
        numbers: list[list[float]] = self.gather(starts).run(own).view(self.size, -1).tolist()
        return numbers

    def sum(self, *values: float) -> list[float]:
        """Returns the sums over all ranks of the numbers that each calls this with."""
        return [sum(column) for column in zip(*self.values_of_all(*values), strict=True)]

    def of_first(self, value: int) -> int:
        """Returns the number that the first rank calls this with."""
        return int(self.values_of_all(value)[0][0])

    def have_all(self, value: int | None) -> bool:
        """Whether all ranks call it with the same number, of 53 bits at most; None is not."""
        values = {own for (own,) in self.values_of_all(-1 if value is None else value)}
        return len(values) == 1 and values != {-1.0}

    def wait_for_all(self) -> None:
        """Returns once every rank calls it."""
        self.values_of_all(0)


ALONE = RankGroup(0, 1, NoExchange())
"""The only rank of a model that one process computes."""
