"""Which part of a model is each rank's: columns of matrices, and attention heads. Ranks are the processes of one host
that compute a model together (tensor parallelism)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.weights.rank_group import RankGroup

__all__ = ["Cut", "HeadPart", "check_num_heads", "even_cut", "head_parts", "starts_of"]

_PANEL = 64  # columns that the kernels multiply at once, or a multiple of them


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of a linear layer: some of its output columns. No sum is cut, so products keep their bits."""

    rows: tuple[slice, ...]
    """The part's rows of the weight [N, K], in this order."""
    num_columns: int
    """Output columns of the layer on all ranks together, N."""
    input_starts: tuple[int, ...] | None = None
    """Where each rank's columns of the layer's input begin, and the end of the last; None if every rank has them all.
    """
    output_starts: tuple[int, ...] | None = None
    """Where each rank's columns of the output begin, and the end of the last; None if they stay with the rank."""

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the part of a weight [N, K] or a bias [N]."""
        parts = [tensor[rows] for rows in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def places_of(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which of these columns of the layer are the part's, as indices into `columns`, and their places in
        the part."""
        own = self.own(torch.arange(self.num_columns))
        places = torch.full((self.num_columns,), -1)
        places[own] = torch.arange(len(own))
        places = places[columns]
        which = (places >= 0).nonzero()[:, 0]
        return which, places[which]


@dataclass(frozen=True, slots=True)
class HeadPart:
    """One rank's attention heads, and the heads of keys and values that they read."""

    query: range
    kv: range


def starts_of(count: int, size: int, unit: int = 1) -> tuple[int, ...]:
    """Returns where each rank's part of `count` columns begins, and the end of the last: [size + 1] numbers.

    Parts consist of whole units, but for the end of the last one, and differ by one unit at most.
    """
    num_units = -(-count // unit)
    return tuple(min(count, num_units * rank // size * unit) for rank in range(size + 1))


def even_cut(num_out: int, group: RankGroup, input_starts: Sequence[int] | None = None) -> Cut | None:
    """Returns a rank's part of a layer with `num_out` output columns, which are gathered. None if every rank computes
    it all: the only one, and any where there are fewer columns than ranks."""
    if group.size == 1 or num_out < group.size:
        return None
    starts = starts_of(num_out, group.size, _PANEL if num_out >= _PANEL * group.size else 1)
    rows = slice(starts[group.rank], starts[group.rank + 1])
    return Cut((rows,), num_out, None if input_starts is None else tuple(input_starts), starts)


def check_num_heads(model: str, num_heads: int, size: int) -> None:
    """Raises ConfigError if the model has fewer attention heads than ranks."""
    if num_heads < size:
        raise ConfigError(
            f"--tensor-parallel-size {size} is more than the {num_heads} attention heads of {model}: "
            f"use {num_heads} at most."
        )


def head_parts(num_heads: int, num_kv_heads: int, size: int) -> list[HeadPart]:
    """Returns each rank's heads, one after the other. There are at most as many ranks as `num_heads`.

    A head of keys and values is one rank's, or, where there are fewer of them than ranks, that of several, each of
    which computes and keeps it.
    """
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        starts = starts_of(num_kv_heads, size)
        return [_heads_of(range(starts[rank], starts[rank + 1]), group) for rank in range(size)]
    parts = []
    ranks = starts_of(size, num_kv_heads)
    for kv in range(num_kv_heads):
        starts = starts_of(group, ranks[kv + 1] - ranks[kv])
        for first, end in pairwise(starts):
            parts.append(HeadPart(range(kv * group + first, kv * group + end), range(kv, kv + 1)))
    return parts


def _heads_of(kv: range, group: int) -> HeadPart:
    return HeadPart(range(kv.start * group, kv.stop * group), kv)
