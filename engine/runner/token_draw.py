"""Categorical draws: samples each row's token from its distribution after temperature, top_k, top_p and min_p.

A token's weight is a whole number: e**((logit - largest) / temperature) in units of 2**-30. A sum of weights is the
same in any order, on any number of threads. So a draw is exactly the same alone and in a batch, and the C++ operator,
which filters without sorting, draws exactly what the code below does. Tokens with less than a billionth of the
likeliest token's probability are never drawn.

Each filter keeps the likeliest of the tokens that the filter before it kept; among equals, the lower ids.
"""

import sys
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import ScheduledRequest
from engine.runner.philox import uniforms

__all__ = ["Draw", "controls_of", "draw_for", "draw_in_torch", "draw_weighed"]

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits [num_rows, vocab], each row's likeliest token [num_rows], controls [num_rows, 5] -> token ids [num_rows].

`controls_of` makes the controls. A likeliest token of -1 marks a row without a possible token; its result is -1, too.
"""

UNIT = 2.0**-30
"""Weights are integers in this unit: the likeliest token of a row has the weight 1 / UNIT."""

_LEAST_TOP_P = sys.float_info.min  # for a top_p of 0: it keeps the likeliest token only


def draw_for(has_kernels: bool) -> Draw:
    """Returns the C++ operator where there are kernels, else the implementation in torch."""
    return cast(Draw, torch.ops.twostep.draw_tokens) if has_kernels else draw_in_torch


def controls_of(requests: Sequence[ScheduledRequest]) -> Tensor:
    """Returns each row's temperature, uniform random number, top_k, top_p and min_p: [num_rows, 5] float64.

    The temperature of a greedy row, which is not drawn, is 0.
    """
    all_params = [request.params for request in requests]
    numbers = uniforms([params.seed for params in all_params], [request.end for request in requests])
    filters = [(params.top_k, max(params.top_p, _LEAST_TOP_P), params.min_p) for params in all_params]
    temperatures = [0.0 if params.is_greedy else params.temperature for params in all_params]
    return torch.from_numpy(np.column_stack([temperatures, numbers, filters]))


def draw_in_torch(logits: Tensor, likeliest: Tensor, controls: Tensor) -> Tensor:
    """Implements `Draw` on any device."""
    largest = logits.gather(1, likeliest.clamp(min=0)[:, None]).float()
    ratios = torch.exp((logits.float() - largest) / controls[:, :1].float().to(logits.device))
    weights = (ratios.nan_to_num() / UNIT + 0.5).long()
    return torch.where(likeliest < 0, likeliest, draw_weighed(weights, controls[:, 1:]))


def draw_weighed(weights: Tensor, controls: Tensor) -> Tensor:
    """Draws a token id per row by integer `weights` [num_rows, vocab], which are changed in place.

    `controls` [num_rows, 4] are those of `controls_of` without the temperature.
    """
    filtered = (controls[:, 1:] != torch.tensor([0, 1, 0])).any(dim=1).nonzero()[:, 0]
    if len(filtered):
        weights[filtered] = _filter(weights[filtered], controls[filtered, 1:])
    sums = weights.cumsum(1)
    totals = sums[:, -1:]
    targets = torch.minimum((controls[:, :1].to(weights.device) * totals).long(), totals - 1)
    return torch.searchsorted(sums, targets, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def _filter(weights: Tensor, filters: Tensor) -> Tensor:
    """Returns `weights` [num_rows, vocab], zero where a filter drops the token.

    `filters` [num_rows, 3] are each row's top_k, top_p and min_p.
    """
    vocab_size = weights.shape[1]
    counts = [min(int(top_k), vocab_size) or vocab_size for top_k in filters[:, 0]]
    ids = torch.arange(vocab_size, device=weights.device)
    keys = (weights * vocab_size + (vocab_size - 1 - ids)).topk(max(counts)).values  # no two are equal
    ordered, ids = keys // vocab_size, vocab_size - 1 - keys % vocab_size
    top_k, top_p, min_p = (
        torch.column_stack([torch.tensor(counts), filters[:, 1:]]).to(keys.device)[..., None].unbind(1)
    )
    ordered *= torch.arange(max(counts), device=keys.device) < top_k
    before = ordered.cumsum(1) - ordered
    ordered *= (top_p == 1) | (before < top_p * ordered.sum(1, keepdim=True))
    ordered *= ordered >= min_p / UNIT
    return torch.zeros_like(weights).scatter(1, ids, ordered)
