"""Linear layers that are merged into one, and the order of its rows."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GATE_BLOCK", "concatenated", "gates_last", "heads_by_kind", "interleaved", "merged_rows", "reordered"]

GATE_BLOCK = 16  # columns, as in engine/kernels/base/operators.h


def merged_rows(linears: Sequence[nn.Linear], join: Callable[[list[Any]], Tensor]) -> nn.Linear:
    """Merges the layers into the first one; all others lose their weights."""
    first = linears[0]
    if any(linear.bias is not None for linear in linears):
        first.bias = nn.Parameter(join([_bias_of(linear) for linear in linears]), requires_grad=False)
    weights = [linear._parameters.pop("weight") for linear in linears]
    first.weight = nn.Parameter(join(weights), requires_grad=False)
    first.out_features = len(first.weight)
    return first


def reordered(linear: nn.Linear, order: Callable[[Tensor], Tensor]) -> None:
    """Gives the rows of a layer's weight and bias another order."""
    for name, rows in linear._parameters.items():
        if rows is not None:
            linear._parameters[name] = nn.Parameter(order(rows), requires_grad=False)


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all tensors, those of the first one first: the order of a merged query, key and value."""
    return torch.cat([*tensors])


def interleaved(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a block of each tensor's rows in turn: the order of a merged gate and up projection."""
    blocks = zip(*(torch.split(tensor, GATE_BLOCK) for tensor in tensors), strict=True)
    return torch.cat([*chain.from_iterable(blocks)])


def heads_by_kind(tensors: Sequence[Tensor], head_size: int) -> Tensor:
    """Returns the rows of all tensors, which have heads of queries, keys and values in turn, with those of each kind
    together."""
    heads = torch.split(concatenated(tensors), head_size)
    return torch.cat([*heads[::3], *heads[1::3], *heads[2::3]])


def gates_last(tensors: Sequence[Tensor], head_size: int) -> Tensor:
    """Returns the rows of all tensors, of which the first one has queries and gates of a head in turn, with all gates
    behind the others."""
    heads = torch.split(tensors[0], head_size)
    return torch.cat([*heads[::2], *tensors[1:], *heads[1::2]])


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
